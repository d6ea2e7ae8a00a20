//! Transformations that inspect elements or combine datasets.

use std::sync::Arc;

use super::{Cardinality, Dataset, Facts, Items, Opener, Shares};
use crate::{Array, BoxError, Error};

impl<T: Send + 'static> Dataset<T> {
    /// Applies a function to every element. An error that it returns ends the pass.
    ///
    /// The batch size stays known: a function applied after `batch` must preserve the leading dimension.
    ///
    /// # Examples
    /// ```
    /// use distribute_input::{Array, Dataset};
    /// let squares = Dataset::range(0..4).map(|x| Ok(Array::scalar(x.item().ok_or("no scalar")?.pow(2))));
    /// assert_eq!(squares.iter().last().unwrap()?.item(), Some(&9));
    /// # Ok::<(), distribute_input::Error>(())
    /// ```
    pub fn map<U, F>(self, function: F) -> Dataset<U>
    where
        U: Send + 'static,
        F: Fn(T) -> Result<U, BoxError> + Send + Sync + 'static,
    {
        let (open, function) = (self.open, Arc::new(function));
        let open: Opener<U> = Arc::new(move |pass| {
            let function = Arc::clone(&function);
            Box::new(open(pass).map(move |item| function(item?).map_err(|error| Error::user("map", error)))) as Items<U>
        });
        Dataset::new(open, self.facts.mapped())
    }

    /// Keeps the elements for which a function returns true. An error that it returns ends the pass.
    pub fn filter<F>(self, wanted: F) -> Dataset<T>
    where
        F: Fn(&T) -> Result<bool, BoxError> + Send + Sync + 'static,
    {
        let (open, wanted) = (self.open, Arc::new(wanted));
        let open: Opener<T> = Arc::new(move |pass| {
            let wanted = Arc::clone(&wanted);
            Box::new(open(pass).filter_map(move |item| match item {
                Ok(item) => match wanted(&item) {
                    Ok(wanted) => wanted.then_some(Ok(item)),
                    Err(error) => Some(Err(Error::user("filter", error))),
                },
                Err(error) => Some(Err(error)),
            })) as Items<T>
        });
        let cardinality = match self.facts.cardinality {
            Cardinality::Known(0) => Cardinality::Known(0),
            _ => Cardinality::Unknown,
        };
        let mut facts = Facts { cardinality, prefetch: 0, ..self.facts };
        facts.stage("filter");
        Dataset::new(open, facts)
    }

    /// Pairs the elements of two datasets; ends with the shorter.
    ///
    /// For tensors in memory, [`from_tensor_slices`](Dataset::from_tensor_slices) of a tuple is faster.
    pub fn zip<U: Send + 'static>(self, other: Dataset<U>) -> Dataset<(T, U)> {
        let (left, right) = (self.open, other.open);
        let open: Opener<(T, U)> = Arc::new(move |pass| {
            let (mut left, mut right) = (left(pass.clone()), right(pass));
            Box::new(std::iter::from_fn(move || match left.next()? {
                Ok(one) => Some(right.next()?.map(|two| (one, two))),
                Err(error) => Some(Err(error)),
            })) as Items<(T, U)>
        });
        let cardinality = self.facts.cardinality.shorter(other.facts.cardinality);
        let facts = Facts::joined("zip", self.facts, other.facts).mapped();
        Dataset::new(open, Facts { cardinality, ..facts })
    }

    /// Appends the elements of another dataset.
    pub fn concatenate(mut self, other: Dataset<T>) -> Dataset<T> {
        self.facts.followed();
        let (first, second) = (self.open, other.open);
        let open: Opener<T> = Arc::new(move |pass| {
            let second = Arc::clone(&second);
            Box::new(first(pass.clone()).chain(std::iter::once_with(move || second(pass)).flatten())) as Items<T>
        });
        let cardinality = self.facts.cardinality.sum(other.facts.cardinality);
        let shares = self.facts.shares.clone().both(other.facts.shares.clone());
        let facts = Facts::joined("concatenate", self.facts, other.facts);
        Dataset::new(open, Facts { cardinality, shares, ..facts })
    }

    /// Pairs each element with its index, from 0.
    pub fn enumerate(self) -> Dataset<(Array<i64>, T)> {
        let open = self.open;
        let open: Opener<(Array<i64>, T)> = Arc::new(move |pass| {
            let numbered = (0_i64..).zip(open(pass));
            Box::new(numbered.map(|(number, item)| Ok((Array::scalar(number), item?)))) as Items<(Array<i64>, T)>
        });
        let mut facts = Facts { prefetch: 0, shares: Shares::None, ..self.facts };
        facts.no_rows("enumerate");
        Dataset::new(open, facts)
    }
}
