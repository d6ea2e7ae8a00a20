//! The values of variables that a process takes over when it joins others.

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use distribute_collectives::{ProcessGroup, Rank, on_local_ranks};
use distribute_values::{Aggregation, DistributedVariable, Synchronization, TensorStorage, Undo};
use parking_lot::Mutex;

use crate::{Error, Result};

/// The variables that an elastic strategy has created and that travel to processes that join, for as long as they have
/// other owners.
///
/// Parts of an on-read sum, and of on-read values without aggregation, do not travel: they are those of their replicas.
#[derive(Default)]
pub(crate) struct Variables(Mutex<Vec<Kept>>);

/// A variable of any tensor library.
#[derive(Clone)]
struct Kept {
    /// Lives as long as the variable.
    owner: Weak<Undo>,
    name: String,
    save: Arc<Save>,
    restore: Arc<Restore>,
}

type Save = dyn Fn(&[ProcessGroup]) -> Result<(Form, Vec<u8>)> + Send + Sync;
type Restore = dyn Fn(&[ProcessGroup], &Form, &[u8]) -> Result<()> + Send + Sync;

/// The element type and the shape of a value.
type Form = (String, Vec<usize>);

/// The values of a process, or those that it has received. Several variables may have one name.
#[derive(Default)]
pub(crate) struct Values {
    forms: Vec<(String, Form, usize)>,
    bytes: Vec<Vec<u8>>,
}

impl Variables {
    /// Adds a variable, of which `owner` is a part that all its clones share.
    pub(crate) fn add<L, T: TensorStorage<L>>(&self, owner: &Arc<Undo>, variable: DistributedVariable<T>) {
        let options = variable.options();
        let is_of_all = options.synchronization == Synchronization::OnWrite
            || matches!(options.aggregation, Aggregation::Mean | Aggregation::OnlyFirstReplica);
        if !is_of_all {
            return;
        }
        let (owner, name) = (Arc::downgrade(owner), variable.name().to_owned());
        let variable = Arc::new(variable);
        let saved = variable.clone();
        let save: Arc<Save> = Arc::new(move |groups| {
            let (value, mut bytes) = (saved.save(groups)?, Vec::new());
            value.read(&mut |buffer| bytes = buffer.as_bytes().to_vec())?;
            Ok((form(&value)?, bytes))
        });
        let restore: Arc<Restore> = Arc::new(move |groups, given, bytes| {
            let Some(value) = variable.components().first().map(TensorStorage::copied).transpose()? else {
                return Ok(());
            };
            let own = form(&value)?;
            let mut fits = own == *given;
            value.write(&mut |mut buffer| match buffer.as_bytes_mut() {
                own if own.len() == bytes.len() && fits => own.copy_from_slice(bytes),
                _ => fits = false,
            })?;
            match fits {
                true => Ok(variable.restore(groups, &value)?),
                false => Err(differs(variable.name(), &own, given)),
            }
        });
        let mut all = self.0.lock();
        all.retain(Kept::is_present);
        all.push(Kept { owner, name, save, restore });
    }

    /// Returns the values of all variables. `groups` are those of this process alone.
    pub(crate) fn values(&self, groups: &[ProcessGroup]) -> Result<Values> {
        let mut values = Values::default();
        for variable in self.present() {
            let (form, bytes) = (variable.save)(groups)?;
            values.forms.push((variable.name, form, bytes.len()));
            values.bytes.push(bytes);
        }
        Ok(values)
    }

    /// Writes received values to the variables of the same names, in the order in which they were created.
    pub(crate) fn restore(&self, groups: &[ProcessGroup], received: Values) -> Result<()> {
        let mut own: HashMap<String, Vec<Kept>> = HashMap::new();
        for variable in self.present().into_iter().rev() {
            own.entry(variable.name.clone()).or_default().push(variable);
        }
        for ((name, form, _), bytes) in received.forms.iter().zip(&received.bytes) {
            match own.get_mut(name).and_then(Vec::pop) {
                Some(variable) => (variable.restore)(groups, form, bytes)?,
                None => tracing::warn!(
                    "another process has a variable {name:?}, and this one does not; create the same variables on \
                     every worker, before the training loop"
                ),
            }
        }
        Ok(())
    }

    /// Returns the variables that still have an owner.
    fn present(&self) -> Vec<Kept> {
        let mut all = self.0.lock();
        all.retain(Kept::is_present);
        all.clone()
    }
}

impl Kept {
    /// Returns whether the variable has another owner; the memory of one that has none is kept until the next one is
    /// created or members change.
    fn is_present(&self) -> bool {
        self.owner.strong_count() > 0
    }
}

impl Values {
    /// Sends the values of the process whose first rank is `root` to all. Returns them if this process lacks them; the
    /// others take part, and keep no more than a piece. Every process calls this.
    pub(crate) fn broadcast(self, groups: &[ProcessGroup], root: usize, lacks: bool) -> Result<Values> {
        let is_source = groups.iter().any(|group| group.rank().index() == root);
        let from_source = |bytes: Vec<u8>| -> Result<Vec<u8>> {
            let all = on_local_ranks(groups, |_, group| group.start().broadcast(bytes.clone(), Rank::of(root)))?;
            Ok(all.unwrap_or_default())
        };
        let header = if is_source { serde_json::to_vec(&self.forms).map_err(unreadable)? } else { Vec::new() };
        let length = from_source((header.len() as u64).to_le_bytes().to_vec())?;
        let length = length.try_into().map_or(0, u64::from_le_bytes);
        let header = if is_source { header } else { zeros(length)? };
        let forms: Vec<(String, Form, usize)> = serde_json::from_slice(&from_source(header)?).map_err(unreadable)?;
        let mut received = Values::default();
        for (index, (name, form, len)) in forms.into_iter().enumerate() {
            let mut bytes = Vec::new();
            if lacks {
                bytes.try_reserve_exact(len).map_err(|_| no_memory(len as u64))?;
            }
            for begin in (0..len).step_by(PIECE) {
                let piece = begin..len.min(begin + PIECE);
                let own = if is_source { self.bytes[index][piece].to_vec() } else { vec![0; piece.len()] };
                let piece = from_source(own)?;
                if lacks {
                    bytes.extend_from_slice(&piece);
                }
            }
            if lacks {
                received.forms.push((name, form, len));
                received.bytes.push(bytes);
            }
        }
        Ok(received)
    }
}

fn form<L, T: TensorStorage<L>>(value: &T) -> Result<Form> {
    Ok((value.dtype()?.to_string(), value.shape()))
}

/// Returns memory whose size another process has sent.
fn zeros(length: u64) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let len = usize::try_from(length).map_err(|_| no_memory(length))?;
    bytes.try_reserve_exact(len).map_err(|_| no_memory(length))?;
    bytes.resize(len, 0);
    Ok(bytes)
}

fn no_memory(length: u64) -> Error {
    let problem = format!(
        "another process sends variables of {length} bytes, for which there is no memory; give this process as much \
         memory as the others have"
    );
    Error::Elastic { problem }
}

fn unreadable(error: serde_json::Error) -> Error {
    let problem = format!(
        "the list of variables that another process sent is not one: {error}; start all processes with one version of \
         the program"
    );
    Error::Elastic { problem }
}

fn differs(name: &str, (dtype, shape): &Form, (given_dtype, given_shape): &Form) -> Error {
    let problem = format!(
        "variable {name:?} is {dtype} {shape:?} here, and {given_dtype} {given_shape:?} on the process whose state \
         this one takes over; create the same variables on every worker, in the same order"
    );
    Error::Elastic { problem }
}

/// Bytes of each operation by which values are sent.
const PIECE: usize = 16 << 20;

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::time::{Duration, Instant};

    use distribute_cluster::{Authority, FileRegister, Membership};
    use distribute_types::ErrorClass;
    use distribute_values::{Assignment, HostTensor, VariableOptions};

    use super::*;
    use crate::{MovingAverage, MultiWorkerMirroredStrategy, Strategy};

    const DEADLINE: Duration = Duration::from_secs(60);

    fn elastic(rank: u32, folder: &Path) -> Strategy {
        let mut membership = Membership::new(rank, 2, "127.0.0.1:1").unwrap();
        membership.advertised_host = Some("127.0.0.1".to_owned());
        let register = FileRegister::new(folder, &membership.job_id()).unwrap();
        let builder = MultiWorkerMirroredStrategy::builder().elastic(1..=2).devices(["CPU:0", "CPU:1"]);
        builder.membership(membership).generations(Authority::Register(Arc::new(register))).build().unwrap()
    }

    fn join(strategy: &Strategy, progress: Option<u64>) -> Result<usize> {
        let gathering = strategy.next_generation(progress)?;
        gathering.form()?;
        let members = gathering.states().members();
        gathering.begin()?;
        Ok(members)
    }

    /// Joins until there are two members.
    fn join_two(strategy: &Strategy, progress: Option<u64>) {
        let began = Instant::now();
        while join(strategy, progress).unwrap_or(0) < 2 {
            assert!(began.elapsed() < DEADLINE);
        }
    }

    fn scalar(value: f64) -> HostTensor {
        HostTensor::scalar(value)
    }

    fn components(variable: &DistributedVariable<HostTensor>) -> Vec<f64> {
        variable.components().iter().flat_map(|it| it.to_elements::<f64>().unwrap()).collect()
    }

    #[test]
    fn a_process_that_joins_takes_over_the_values_of_variables() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        let create = |strategy: &Strategy| {
            let average = MovingAverage::debiased(strategy, "norm", &scalar(0.0), 0.5).unwrap();
            let mut values = ["seen", "mean"].into_iter().zip([Aggregation::Sum, Aggregation::Mean]);
            let values = [(); 2].map(|()| {
                let (name, aggregation) = values.next().unwrap();
                strategy.variable(name, &scalar(0.0), VariableOptions::on_read(aggregation)).unwrap()
            });
            // Two of one name, of which one more was dropped.
            drop(strategy.variable("twin", &scalar(9.0), VariableOptions::default()).unwrap());
            let twin = || strategy.variable("twin", &scalar(1.0), VariableOptions::default()).unwrap();
            (average, values, [twin(), twin()])
        };
        let value = |strategy: &Strategy, average: &MovingAverage<HostTensor>| {
            let value = strategy.with_call_context(|context| average.value(context)).unwrap();
            value.to_elements::<f64>().unwrap()[0]
        };
        let update = |strategy: &Strategy, average: &MovingAverage<HostTensor>| {
            let run = strategy.run_with((), |context, ()| {
                average.update(context.call_context(), &scalar(8.0))?;
                context.commit()
            });
            run.map(drop)
        };
        let strategy = elastic(0, folder);
        let (average, [seen, mean], [one, other]) = create(&strategy);
        assert_eq!(join(&strategy, None).unwrap(), 1);
        for _ in 0..3 {
            update(&strategy, &average).unwrap();
        }
        strategy.with_call_context(|context| one.assign(context, Assignment::Set, &scalar(5.0))).unwrap();
        let own = strategy.run_with((), |context, ()| {
            let own = scalar(2.0 + 2.0 * context.replica_id() as f64);
            seen.assign(context.call_context(), Assignment::Set, &own)?;
            Ok::<_, Error>(mean.assign(context.call_context(), Assignment::Set, &own)?)
        });
        own.unwrap();
        std::thread::scope(|scope| {
            let joining = scope.spawn(|| {
                let strategy = elastic(1, folder);
                let (average, [seen, mean], [one, other]) = create(&strategy);
                join_two(&strategy, None);
                let taken = value(&strategy, &average);
                update(&strategy, &average).unwrap();
                let on_read = [components(&seen), components(&mean)];
                ((taken, value(&strategy, &average)), on_read, [components(&one), components(&other)])
            });
            // Until it is interrupted by the other, which joins.
            let began = Instant::now();
            while strategy.run_with((), |context, ()| context.barrier()).is_ok() {
                assert!(began.elapsed() < DEADLINE);
                std::thread::sleep(Duration::from_millis(10));
            }
            join_two(&strategy, Some(3));
            update(&strategy, &average).unwrap();
            let (averages, on_read, twins) = joining.join().unwrap();
            assert_eq!(averages, (8.0, 8.0));
            assert_eq!(on_read, [[0.0; 2], [3.0; 2]]);
            assert_eq!(twins, [[5.0; 2], [1.0; 2]]);
        });
        // Those of the process that has sent them are as they were.
        assert_eq!([components(&seen), components(&mean)], [[2.0, 4.0]; 2]);
        assert_eq!([components(&one), components(&other)], [[5.0; 2], [1.0; 2]]);
    }

    #[test]
    fn a_variable_of_another_form_is_an_error_in_words() {
        let strategy = elastic(0, tempfile::tempdir().unwrap().path());
        let variables = Variables::default();
        let kept = strategy.variable("v", &scalar(1.0), VariableOptions::default()).unwrap();
        variables.add(kept.undo().unwrap(), kept.clone());
        let mut values = variables.values(&strategy.groups()).unwrap();
        values.forms[0].1 = ("f32".to_owned(), vec![2]);
        let error = variables.restore(&strategy.groups(), values).unwrap_err();
        assert_eq!(error.exit_code(), 2);
        let told = error.to_string();
        assert!(told.contains("\"v\" is f64 [] here, and f32 [2] on the process"), "{told}");
    }
}
