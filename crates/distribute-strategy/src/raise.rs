//! The end of a replica by code that cannot return an error.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use crate::Error;

/// Ends this replica with an error, as if its closure had returned it: peers are told, and
/// [`Strategy::run_with`](crate::Strategy::run_with) returns this very error.
///
/// For library code that a tensor library calls during forward or backward and that has no way to return an error. Call
/// it on a replica's thread; anywhere else it unwinds as a panic does. It prints no panic message. A program that is
/// built with `panic = "abort"` ends at once.
///
/// # Examples
/// ```
/// use distribute_strategy::{Error, MirroredStrategy, raise};
/// let strategy = MirroredStrategy::builder().devices(["CPU:0", "CPU:1"]).build()?;
/// let failure = strategy.run_with((), |context, ()| match context.replica_id() {
///     0 => context.barrier(),
///     _ => raise(Error::NoData),
/// });
/// assert!(matches!(failure, Err(Error::NoData)));
/// # Ok::<(), Error>(())
/// ```
pub fn raise(error: Error) -> ! {
    resume_unwind(Box::new(Raised(error)))
}

/// The payload by which [`raise`] unwinds.
struct Raised(Error);

/// Runs `body` and returns an error that was [raised](raise) in it. Other panics continue.
pub(crate) fn catch_raised<R, E: From<Error>>(body: impl FnOnce() -> Result<R, E>) -> Result<R, E> {
    // The replica's state is restored after any failure, as after a panic.
    catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|payload| match payload.downcast::<Raised>() {
        Ok(raised) => Err(E::from(raised.0)),
        Err(payload) => resume_unwind(payload),
    })
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use distribute_types::{Class, ErrorClass};

    use super::*;
    use crate::{CommunicationOptions, MirroredStrategy, ReplicaContext, Strategy};

    fn strategy() -> Strategy {
        let communication = CommunicationOptions::default().timeout(Duration::from_secs(60));
        MirroredStrategy::builder().devices(["CPU:0", "CPU:1"]).communication(communication).build().unwrap()
    }

    /// As an operation that a tensor library calls without a way to return an error.
    fn callback(context: &ReplicaContext) {
        if context.replica_id() == 1 {
            let problem = "cut differently".to_owned();
            raise(Error::Sharding { problem });
        }
        if let Err(error) = context.barrier() {
            raise(error);
        }
    }

    #[test]
    fn a_raised_error_is_that_of_the_run_and_reaches_peers() {
        let strategy = strategy();
        let began = Instant::now();
        let told = std::sync::Mutex::new(String::new());
        let outcome = strategy.run_with((), |context, ()| {
            let barrier = (context.replica_id() == 0).then(|| context.barrier());
            if let Some(Err(error)) = barrier {
                *told.lock().unwrap() = error.to_string();
            }
            callback(context);
            Ok::<(), Error>(())
        });
        let error = outcome.unwrap_err();
        assert!(matches!(&error, Error::Sharding { problem } if problem == "cut differently"), "{error}");
        assert_eq!(error.class(), Class::CONFIGURATION);
        let told = told.lock().unwrap();
        assert!(told.contains("replica 1 failed: ") && told.contains("cut differently"), "{told}");
        assert!(began.elapsed() < Duration::from_secs(30));
        // The strategy is as good as new.
        strategy.run_with((), |context, ()| context.barrier()).unwrap();
    }

    #[test]
    fn other_panics_stay_panics() {
        let outcome = strategy().run_with((), |context, ()| {
            assert!(context.replica_id() != 1, "no gradient");
            context.barrier()
        });
        let error = outcome.unwrap_err();
        assert!(matches!(error, Error::ReplicaPanicked { replica: 1, .. }), "{error}");
    }
}
