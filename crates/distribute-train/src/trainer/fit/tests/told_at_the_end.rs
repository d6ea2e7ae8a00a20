//! Workers that are told to stop after their last step.

use std::sync::atomic::AtomicBool;
use std::time::Instant;

use super::*;

/// Sets a flag at the end of an epoch, and waits until the process makes this request.
struct Tells(u32, Request, Arc<AtomicBool>);

impl Callback for Tells {
    fn epoch_end(&mut self, training: &mut Training<'_>) -> Result<()> {
        if training.epoch == self.0 {
            self.2.store(true, Ordering::Relaxed);
            let (asked, deadline) = (training.strategy.request_flag(self.1), Instant::now() + MINUTE);
            while !asked.load(Ordering::Relaxed) && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(2));
            }
        }
        Ok(())
    }
}

const MINUTE: Duration = Duration::from_secs(60);

/// Trains for two epochs on two workers, one of which is told to stop at the end of this epoch. Returns the outcomes,
/// and the steps that the process has made.
fn told_in(
    epoch: u32,
    change: impl Fn(Fit<Array<i64>, Error>) -> Fit<Array<i64>, Error> + Sync,
) -> [(String, usize); 2] {
    on_two(|rank, address| {
        let told = Arc::new(AtomicBool::new(false));
        let mut config = TerminationConfig::default().signals(Vec::new()).watch_every(Duration::from_millis(10));
        let tells = (rank == 1).then(|| Tells(epoch, Request::Leave, Arc::clone(&told)));
        if rank == 1 {
            config = config.watch(move || told.load(Ordering::Relaxed));
        }
        let toy = Toy::new(one_of_two(rank, address));
        let outcome = fit(&toy, &Numbers(8), change(Fit::epochs(2).callback(tells).stop_on(config)));
        let outcome =
            outcome.map_or_else(|error| error.to_string(), |history| format!("{} epochs", history.epochs.len()));
        (outcome, toy.calls.load(Ordering::Relaxed))
    })
}

#[test]
fn a_worker_that_is_told_to_stop_after_the_last_step_leaves_a_training_that_ends_when_it_is_started_again() {
    let folder = tempfile::tempdir().unwrap();
    let backup = |fit: Fit<_, _>| fit.callback(BackupAndRestore::new(folder.path()));
    for (outcome, steps) in told_in(2, backup) {
        assert!(outcome.contains("stopped after step 8, which is saved"), "{outcome}");
        assert_eq!(steps, 8);
    }
    assert_eq!(kept(folder.path()).last().map(String::as_str), Some("step-00000008"));
    assert_eq!(told_in(0, backup), [0, 1].map(|_| ("2 epochs".to_owned(), 0)));
    assert!(kept(folder.path()).is_empty());
}

#[test]
fn a_worker_that_is_told_to_stop_after_the_last_step_ends_the_training_if_no_callback_would_resume_it() {
    let folder = tempfile::tempdir().unwrap();
    let whole = [0, 1].map(|_| ("2 epochs".to_owned(), 8));
    assert_eq!(told_in(2, |fit| fit.callback(ModelCheckpoint::new(folder.path()))), whole);
    assert_eq!(told_in(2, |fit| fit), whole);
}

/// Makes the requests of the only process those of all, as the steps of an optimizer do.
struct Agrees;

impl Callback for Agrees {
    fn step_end(&mut self, training: &mut Training<'_>) -> Result<()> {
        training.strategy.agree_alone();
        Ok(())
    }
}

#[test]
fn a_process_that_is_told_to_stop_at_the_end_of_one_training_stops_in_the_next() {
    for grace_period in [Duration::ZERO, MINUTE] {
        let (toy, told) = (Toy::of_losses(&[]), Arc::new(AtomicBool::new(false)));
        let config = || {
            let config = TerminationConfig::default().signals(Vec::new()).grace_period(grace_period);
            config.watch_every(Duration::from_millis(10))
        };
        let asks = if grace_period.is_zero() { Request::Leave } else { Request::Save };
        let tells = Tells(2, asks, Arc::clone(&told));
        let watched = config().watch(move || told.load(Ordering::Relaxed));
        let history = fit(&toy, &Numbers(8), Fit::epochs(2).callback(Agrees).callback(tells).stop_on(watched)).unwrap();
        assert_eq!(history.epochs.len(), 2);
        let error = fit(&toy, &Numbers(8), Fit::epochs(2).callback(Agrees).stop_on(config())).unwrap_err();
        assert!(matches!(error, Error::Unsaved { step: 1, .. }), "{grace_period:?}: {error}");
        fit(&toy, &Numbers(8), Fit::epochs(1).callback(Agrees).stop_on(config())).unwrap();
    }
}
