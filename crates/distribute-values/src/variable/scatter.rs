//! Writes to some rows of a variable.

use distribute_collectives::{ProcessGroup, Rank, ReduceOp};
use distribute_device::{BufferMut, BufferRef};
use distribute_types::with_dtype;

use super::{Aggregation, CallContext, DistributedVariable, Synchronization};
use crate::elements::{Arithmetic, Wide};
use crate::{Error, Result, TensorStorage};

/// The operation of a scatter on the present rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scatter {
    /// Replaces the rows.
    Update,
    /// Adds to the rows.
    Add,
    /// Subtracts from the rows.
    Sub,
    /// Multiplies the rows.
    Mul,
    /// Divides the rows.
    Div,
    /// Keeps the smaller of each two elements; NaN if either is NaN.
    Min,
    /// Keeps the greater of each two elements; NaN if either is NaN.
    Max,
}

impl Scatter {
    /// Applies the operation to rows of elements in host memory, in the order of `rows`; a row may be named more than
    /// once.
    ///
    /// # Shapes
    /// `target` holds rows of `row_len` elements; `values` holds one row for each of `rows`.
    ///
    /// # Errors
    /// [`Error::Device`] if the types differ, a row lies outside `target`, or there are too few values.
    pub fn apply(
        self,
        mut target: BufferMut<'_>,
        row_len: usize,
        rows: impl IntoIterator<Item = usize>,
        values: BufferRef<'_>,
    ) -> Result<()> {
        with_dtype!(values.dtype(), E => {
            let (target, values) = (target.as_mut_slice::<E>()?, values.as_slice::<E>()?);
            let len = target.len();
            for (at, row) in rows.into_iter().enumerate() {
                let outside = |start: usize, len| {
                    distribute_device::Error::OutOfRange { start, end: start + row_len, len }
                };
                let start = row.saturating_mul(row_len);
                let target = target.get_mut(start..start.saturating_add(row_len)).ok_or_else(|| outside(start, len))?;
                let from = at * row_len;
                let values = values.get(from..from + row_len).ok_or_else(|| outside(from, values.len()))?;
                target.iter_mut().zip(values).for_each(|(a, b)| *a = scattered(self, *a, *b));
            }
        });
        Ok(())
    }
}

/// Rows with their indices.
struct Rows<E> {
    indices: Vec<i64>,
    values: Vec<E>,
}

impl<T> DistributedVariable<T> {
    /// Writes the rows `indices` of a variable as seen from `context`, in order; an index may occur more than once.
    ///
    /// Inside a replica every replica must call this, with any number of rows. The rows of all replicas are written one
    /// after another in the order of replicas, for a mean each divided by the number of replicas; with
    /// [`Aggregation::OnlyFirstReplica`], only the first replica's. `Update`, `Min` and `Max` cannot be summed over
    /// replicas, and are errors with other aggregations. Outside, all components are written.
    ///
    /// # Shapes
    /// `rows` is `[indices.len(), …]`, followed by the variable's shape without its first dimension.
    ///
    /// # Errors
    /// - [`Error::Variable`] for on-read variables, for scalars, and if the rules forbid the write.
    /// - [`Error::Shape`] if the shape of `rows` does not fit, and [`Error::Row`] for an index outside the variable.
    /// - [`Error::Collective`] if a replica is missing or fails.
    /// - [`Error::Tensor`] or [`Error::Device`] if a tensor cannot be read or written.
    ///
    /// # Examples
    /// ```
    /// use distribute_collectives::ProcessGroup;
    /// use distribute_values::{DistributedVariable, HostTensor, CallContext, Scatter, TensorStorage, VariableOptions};
    ///
    /// let groups = ProcessGroup::local(1)?;
    /// let component = HostTensor::new(&[3, 1], vec![1.0, 2.0, 3.0])?;
    /// let table = DistributedVariable::new("table", vec![component], VariableOptions::default())?;
    /// let rows = HostTensor::new(&[2, 1], vec![10.0, 20.0])?;
    /// table.scatter(CallContext::Cross { groups: &groups }, Scatter::Add, &[2, 0], &rows)?;
    /// assert_eq!(table.components()[0].to_elements::<f64>()?, [21.0, 2.0, 13.0]);
    /// # Ok::<(), distribute_values::Error>(())
    /// ```
    ///
    /// # Source
    /// `tf.Variable.scatter_add` and its siblings under a strategy.
    pub fn scatter<L>(&self, context: CallContext<'_>, scatter: Scatter, indices: &[i64], rows: &T) -> Result<()>
    where
        T: TensorStorage<L>,
    {
        if self.options.synchronization == Synchronization::OnRead {
            return Err(self.refuse("rows of an on-read variable cannot be written; assign the whole"));
        }
        let shape = self.component(0)?.shape();
        let Some((count, row)) = shape.split_first() else {
            return Err(self.refuse("it has no rows, being a scalar; assign it"));
        };
        let expected: Vec<usize> = [indices.len()].into_iter().chain(row.iter().copied()).collect();
        if rows.shape() != expected {
            let remedy = "give one row per index";
            return Err(Error::Shape { what: "scatter", replica: 0, got: rows.shape(), expected, remedy });
        }
        if let Some(index) = indices.iter().find(|index| usize::try_from(**index).map_or(true, |index| index >= *count))
        {
            return Err(Error::Row { name: self.name.clone(), index: *index, rows: *count });
        }
        let row_len: usize = row.iter().product();
        with_dtype!(rows.dtype()?, E => {
            let own = Rows { indices: indices.to_vec(), values: rows.to_elements::<E>()? };
            match context {
                CallContext::Update { local } => {
                    self.keep_merged(local)?;
                    self.scatter_one(local, scatter, row_len, &own)
                }
                CallContext::Cross { .. } => (0..self.copies()).try_for_each(|local| {
                    self.keep_merged(local)?;
                    self.scatter_one(local, scatter, row_len, &own)
                }),
                CallContext::Replica { local, .. } if self.writes_locally() => {
                    self.keep(local)?;
                    self.scatter_one(local, scatter, row_len, &own)
                }
                CallContext::Replica { local, group } => {
                    let tag = self.form().within(&format!("{scatter:?}")).tag(&shape);
                    let all = self.rows_of_all(group, scatter, (row_len, tag), own);
                    let all = all.map_err(|error| error.in_variable(&self.name))?;
                    let write = || {
                        self.keep(local)?;
                        self.scatter_one(local, scatter, row_len, &all)
                    };
                    if self.shared { self.write_shared(local, group, write) } else { write() }
                }
            }
        })
    }

    /// Collects the rows of all replicas, which pass the same tag.
    fn rows_of_all<E: Arithmetic>(
        &self,
        group: &ProcessGroup,
        scatter: Scatter,
        (row_len, tag): (usize, u32),
        own: Rows<E>,
    ) -> Result<Rows<E>> {
        let start = group.start().tag(tag);
        match self.options.aggregation {
            Aggregation::None => Err(self.refuse(
                "a replica cannot write it, because the copies would differ; give it an aggregation, write it outside \
                 the replicas, or ask for local_writes",
            )),
            Aggregation::OnlyFirstReplica => {
                let count = start.broadcast(vec![own.indices.len() as u64], Rank(0))?.wait()?[0] as usize;
                let (mut indices, mut values) = (own.indices, own.values);
                indices.resize(count, 0);
                values.resize(count * row_len, E::default());
                let indices = start.broadcast(indices, Rank(0))?.wait()?;
                let values = start.broadcast(values, Rank(0))?.wait()?;
                Ok(Rows { indices, values })
            }
            Aggregation::Sum | Aggregation::Mean
                if matches!(scatter, Scatter::Update | Scatter::Min | Scatter::Max) =>
            {
                Err(self.refuse(
                    "rows of several replicas cannot be summed and then replace others or be compared with them; use \
                     Aggregation::OnlyFirstReplica, or write outside the replicas",
                ))
            }
            aggregation => {
                let count = vec![own.indices.len() as u64];
                let [_, counts] = start.all_gather(count, vec![0u64; group.world_size()])?.wait()?;
                let counts: Vec<usize> = counts.into_iter().map(|count| count as usize).collect();
                let lens: Vec<usize> = counts.iter().map(|count| count * row_len).collect();
                let mut indices = vec![0i64; counts.iter().sum()];
                group.parts(&counts).tag(tag).all_gather(&own.indices, &mut indices)?;
                let mut values = vec![E::default(); lens.iter().sum()];
                group.parts(&lens).tag(tag).all_gather(&own.values, &mut values)?;
                if aggregation == Aggregation::Mean {
                    values.iter_mut().for_each(|value| *value = value.ratio(counts.len() as u64));
                }
                Ok(Rows { indices, values })
            }
        }
    }

    fn scatter_one<L, E: Arithmetic>(
        &self,
        local: usize,
        scatter: Scatter,
        row_len: usize,
        rows: &Rows<E>,
    ) -> Result<()>
    where
        T: TensorStorage<L>,
    {
        if row_len == 0 {
            return Ok(());
        }
        let divides_by_zero =
            scatter == Scatter::Div && rows.values.iter().any(|value| E::default().div(*value).is_none());
        if divides_by_zero {
            return Err(self.refuse("a row of whole numbers to divide by has a zero; give others"));
        }
        let mut outcome = Ok(());
        self.component(local)?.write(&mut |target| {
            // Indices were checked by the caller.
            let indices = rows.indices.iter().map(|index| *index as usize);
            outcome = scatter.apply(target, row_len, indices, BufferRef::from(&rows.values[..]));
        })?;
        outcome
    }
}

fn scattered<E: Arithmetic>(scatter: Scatter, a: E, b: E) -> E {
    match scatter {
        Scatter::Update => b,
        Scatter::Add => a.add(b),
        Scatter::Sub => a.sub(b),
        Scatter::Mul => a.mul(b),
        Scatter::Div => a.div(b).unwrap_or(a),
        Scatter::Min => E::narrow(a.widen().combine(ReduceOp::Min, b.widen())),
        Scatter::Max => E::narrow(a.widen().combine(ReduceOp::Max, b.widen())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{HostTensor, VariableOptions};

    fn table(options: VariableOptions) -> DistributedVariable<HostTensor> {
        let component = || HostTensor::new(&[3, 2], vec![1.0; 6]).unwrap();
        DistributedVariable::new("table", vec![component(), component()], options).unwrap()
    }

    fn rows(values: &[f64]) -> HostTensor {
        HostTensor::new(&[values.len(), 2], values.iter().flat_map(|value| [*value; 2]).collect()).unwrap()
    }

    /// Returns the first element of each row of each component.
    fn firsts(table: &DistributedVariable<HostTensor>) -> Vec<Vec<f64>> {
        let first = |component: &HostTensor| component.to_elements::<f64>().unwrap().into_iter().step_by(2).collect();
        table.components().iter().map(first).collect()
    }

    /// Replica 0 writes row 1 once; replica 1 writes rows 1 and 2.
    fn in_replicas(table: &DistributedVariable<HostTensor>, scatter: Scatter) -> Result<()> {
        let groups = ProcessGroup::local(2).unwrap();
        let given: [(&[i64], HostTensor); 2] = [(&[1], rows(&[2.0])), (&[1, 2], rows(&[4.0, 8.0]))];
        std::thread::scope(|scope| {
            let write = |(local, (indices, values)): (usize, &(&[i64], HostTensor))| {
                table.scatter(CallContext::Replica { local, group: &groups[local] }, scatter, indices, values)
            };
            let handles: Vec<_> = given.iter().enumerate().map(|given| scope.spawn(move || write(given))).collect();
            handles.into_iter().try_for_each(|handle| handle.join().unwrap())
        })
    }

    #[test]
    fn rows_of_all_replicas_are_written_on_every_copy() {
        use Aggregation::{Mean, OnlyFirstReplica, Sum};
        for (aggregation, scatter, expected) in [
            (Sum, Scatter::Add, [1.0, 7.0, 9.0]),
            (Sum, Scatter::Sub, [1.0, -5.0, -7.0]),
            (Sum, Scatter::Mul, [1.0, 8.0, 8.0]),
            (Mean, Scatter::Add, [1.0, 4.0, 5.0]),
            (Mean, Scatter::Div, [1.0, 0.5, 0.25]),
            (OnlyFirstReplica, Scatter::Update, [1.0, 2.0, 1.0]),
            (OnlyFirstReplica, Scatter::Max, [1.0, 2.0, 1.0]),
            (OnlyFirstReplica, Scatter::Min, [1.0, 1.0, 1.0]),
        ] {
            let table = table(VariableOptions::on_write(aggregation));
            in_replicas(&table, scatter).unwrap();
            assert_eq!(firsts(&table), [expected; 2], "{aggregation:?} {scatter:?}");
        }
    }

    #[test]
    fn what_the_rules_forbid_is_refused() {
        for (options, scatter) in [
            (VariableOptions::default(), Scatter::Add),
            (VariableOptions::on_write(Aggregation::Sum), Scatter::Update),
            (VariableOptions::on_write(Aggregation::Mean), Scatter::Max),
            (VariableOptions::on_read(Aggregation::Sum), Scatter::Add),
        ] {
            let error = in_replicas(&table(options), scatter).unwrap_err();
            assert!(matches!(error, Error::Variable { .. }), "{error}");
        }
        let table = table(VariableOptions::default());
        let update = CallContext::Update { local: 0 };
        let error = table.scatter(update, Scatter::Add, &[3], &rows(&[1.0])).unwrap_err().to_string();
        assert!(error.contains("row 3") && error.contains("0..3"), "{error}");
        assert!(table.scatter(update, Scatter::Add, &[-1], &rows(&[1.0])).is_err());
        assert!(matches!(table.scatter(update, Scatter::Add, &[0, 1], &rows(&[1.0])), Err(Error::Shape { .. })));
        assert_eq!(firsts(&table), [[1.0; 3]; 2]);
        let whole =
            DistributedVariable::new("n", vec![HostTensor::new(&[1], vec![4i32]).unwrap()], VariableOptions::default());
        let zero = HostTensor::new(&[1], vec![0i32]).unwrap();
        let error = whole.unwrap().scatter(update, Scatter::Div, &[0], &zero).unwrap_err().to_string();
        assert!(error.contains("zero"), "{error}");
    }

    #[test]
    fn extremes_keep_what_is_not_a_number() {
        let v = DistributedVariable::new(
            "v",
            vec![HostTensor::new(&[2], vec![1.0, f64::NAN]).unwrap()],
            VariableOptions::default(),
        );
        let (v, rows) = (v.unwrap(), HostTensor::new(&[2], vec![f64::NAN, 1.0]).unwrap());
        for scatter in [Scatter::Min, Scatter::Max] {
            v.scatter(CallContext::Update { local: 0 }, scatter, &[0, 1], &rows).unwrap();
            assert!(v.components()[0].to_elements::<f64>().unwrap().iter().all(|x| x.is_nan()), "{scatter:?}");
        }
    }

    #[test]
    fn outside_all_copies_are_written_and_locally_one() {
        let groups = ProcessGroup::local(2).unwrap();
        let outside = table(VariableOptions::default());
        outside.scatter(CallContext::Cross { groups: &groups }, Scatter::Update, &[0, 0], &rows(&[5.0, 6.0])).unwrap();
        assert_eq!(firsts(&outside), [[6.0, 1.0, 1.0]; 2]);
        let locally = table(VariableOptions { local_writes: true, ..VariableOptions::default() });
        in_replicas(&locally, Scatter::Add).unwrap();
        assert_eq!(firsts(&locally), [[1.0, 3.0, 1.0], [1.0, 5.0, 9.0]]);
    }
}
