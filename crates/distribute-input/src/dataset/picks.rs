//! Sources with random access.
//!
//! As long as elements are rows of a value in memory, a pipeline moves row numbers only; a batch is then gathered in
//! one copy instead of being stacked from single rows.

use std::sync::Arc;

use super::{
    pass::{Items, Opener},
    selection::Selection,
};
use crate::Result;

/// A value in memory whose rows are elements.
pub(crate) trait Rows<T>: Send + Sync {
    /// Returns one row as an element.
    fn row(&self, index: usize) -> Result<T>;

    /// Returns the given rows as a batch; a view if they are consecutive and the library has views.
    fn pick(&self, rows: &[usize]) -> Result<T>;
}

/// Elements represented by row numbers of a source.
pub(crate) struct Picks<T> {
    pub(crate) source: Arc<dyn Rows<T>>,
    pub(crate) order: Order,
}

/// The rows that make up the elements, in order.
#[derive(Clone)]
pub(crate) enum Order {
    /// Each element is a row.
    Rows(Opener<usize>),
    /// Each element is a batch of rows.
    Batches(Opener<Vec<usize>>),
}

impl<T: Send + 'static> Picks<T> {
    /// Returns an opener of the elements themselves.
    pub(crate) fn opener(&self) -> Opener<T> {
        let source = Arc::clone(&self.source);
        match self.order.clone() {
            Order::Rows(open) => Arc::new(move |pass| {
                let source = Arc::clone(&source);
                Box::new(open(pass).map(move |row| source.row(row?))) as Items<T>
            }),
            Order::Batches(open) => Arc::new(move |pass| {
                let source = Arc::clone(&source);
                Box::new(open(pass).map(move |rows| source.pick(&rows?))) as Items<T>
            }),
        }
    }

    pub(crate) fn select(self, selection: Selection) -> Picks<T> {
        let order = match self.order {
            Order::Rows(open) => Order::Rows(selection.apply(open)),
            Order::Batches(open) => Order::Batches(selection.apply(open)),
        };
        Picks { source: self.source, order }
    }
}

impl<T> Clone for Picks<T> {
    fn clone(&self) -> Self {
        Picks { source: Arc::clone(&self.source), order: self.order.clone() }
    }
}

/// Returns whether the rows are consecutive, so that they can be sliced.
pub(crate) fn consecutive(rows: &[usize]) -> bool {
    rows.windows(2).all(|pair| pair[0].checked_add(1) == Some(pair[1]))
}
