//! Ragged and sparse arrays, and tuples.

use distribute_input::{Array, Ragged, RaggedArrays, Sparse, SparseArrays};

use super::arrays::{Value, component, take};
use super::{Components, Form, Transfer};
use crate::{Error, Result};

impl<T: Value> Transfer<RaggedArrays> for Ragged<T> {
    fn send(&self, components: &mut Components) -> Result<()> {
        if self.row_splits().is_empty() {
            components.push(component(self.values(), Form::RaggedRow));
            return Ok(());
        }
        components.push(component(self.values(), Form::RaggedValues));
        let splits: Vec<u64> = self.row_splits().iter().map(|split| *split as u64).collect();
        components.push(component(&Array::from(splits), Form::RaggedSplits));
        Ok(())
    }

    fn receive(components: &mut Components) -> Result<Ragged<T>> {
        if components.peek().is_some_and(|next| next.form == Form::RaggedRow) {
            return Ok(Ragged::from(take::<T>(components, Form::RaggedRow, RAGGED)?));
        }
        let values = take::<T>(components, Form::RaggedValues, RAGGED)?;
        let splits = take::<u64>(components, Form::RaggedSplits, RAGGED)?;
        Ok(Ragged::new(values, extents(splits.as_slice())?)?)
    }
}

impl<T: Value> Transfer<SparseArrays> for Sparse<T> {
    fn send(&self, components: &mut Components) -> Result<()> {
        components.push(component(self.indices(), Form::SparseIndices));
        components.push(component(self.values(), Form::SparseValues));
        let shape: Vec<u64> = self.dense_shape().iter().map(|extent| *extent as u64).collect();
        components.push(component(&Array::from(shape), Form::SparseShape));
        Ok(())
    }

    fn receive(components: &mut Components) -> Result<Sparse<T>> {
        let indices = take::<i64>(components, Form::SparseIndices, SPARSE)?;
        let values = take::<T>(components, Form::SparseValues, SPARSE)?;
        let shape = take::<u64>(components, Form::SparseShape, SPARSE)?;
        Ok(Sparse::new(indices, values, extents(shape.as_slice())?)?)
    }
}

const RAGGED: &str = "a ragged array of that type";
const SPARSE: &str = "a sparse array of that type";

fn extents(numbers: &[u64]) -> Result<Vec<usize>> {
    let extents: Option<_> = numbers.iter().map(|number| usize::try_from(*number).ok()).collect();
    extents.ok_or_else(|| Error::Element { problem: "an extent exceeds the memory of this machine".to_owned() })
}

macro_rules! tuple_transfer {
    ($($tag:ident $component:ident $at:tt),+) => {
        impl<$($tag, $component: Transfer<$tag>),+> Transfer<($($tag,)+)> for ($($component,)+) {
            fn send(&self, components: &mut Components) -> Result<()> {
                $(self.$at.send(components)?;)+
                Ok(())
            }

            fn receive(components: &mut Components) -> Result<Self> {
                Ok(($(<$component as Transfer<$tag>>::receive(components)?,)+))
            }
        }
    };
}

tuple_transfer!(LA A 0);
tuple_transfer!(LA A 0, LB B 1);
tuple_transfer!(LA A 0, LB B 1, LC C 2);
tuple_transfer!(LA A 0, LB B 1, LC C 2, LD D 3);
