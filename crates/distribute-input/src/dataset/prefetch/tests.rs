use std::sync::{
    atomic::{AtomicUsize, Ordering},
    mpsc,
};

use super::*;
use crate::Array;

/// Returns endless integers, and the number of those that were made.
fn counted() -> (Dataset<Array<i64>>, Arc<AtomicUsize>) {
    let made = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&made);
    let data = Dataset::from_generator(move || {
        let counter = Arc::clone(&counter);
        (0..).map(move |value| {
            counter.fetch_add(1, Ordering::SeqCst);
            Ok(Array::scalar(value))
        })
    });
    (data, made)
}

#[test]
fn order_is_kept_at_every_depth() {
    for depth in [0, 1, 3, 100, AUTOTUNE] {
        let data = Dataset::range(0..500).prefetch(depth);
        let values: Vec<_> = data.iter().map(|item| *item.unwrap().item().unwrap()).collect();
        assert_eq!(values, (0..500).collect::<Vec<_>>());
    }
}

#[test]
fn no_more_is_read_ahead_than_asked() {
    for (depth, most) in [(1, 1), (4, 4), (AUTOTUNE, MAX_AUTOTUNED)] {
        let (data, made) = counted();
        for (taken, item) in data.prefetch(depth).iter().take(300).enumerate() {
            item.unwrap();
            // The thread holds one more that is not in the buffer.
            let ahead = made.load(Ordering::SeqCst) - (taken + 1);
            assert!(ahead <= most + 1, "{ahead} ahead at depth {depth}");
        }
    }
}

#[test]
fn a_depth_that_was_not_enough_is_doubled_and_kept_for_later_passes() {
    let depth = Depth::new(AUTOTUNE);
    let start = || {
        let (allow, allowed) = mpsc::channel::<()>();
        let open = move || Box::new(std::iter::from_fn(move || allowed.recv().ok().map(Ok))) as Items<()>;
        (allow, Prefetched::start(open, &depth, Limit::none(), Duration::from_secs(10)).unwrap())
    };
    let (allow, mut pass) = start();
    let fills = |allow: &mpsc::Sender<()>, pass: &Prefetched<()>, count: usize| {
        (0..count).for_each(|_| allow.send(()).unwrap());
        let began = Instant::now();
        while pass.shared.lock().items.len() < count {
            assert!(began.elapsed() < Duration::from_secs(10), "the buffer is not filled");
            thread::yield_now();
        }
    };
    for (now, later) in [(2, 4), (4, 8), (8, 16), (16, 16), (16, 16)] {
        assert_eq!(depth.get(), now);
        fills(&allow, &pass, now);
        assert_eq!(pass.by_ref().take(now).filter(Result::is_ok).count(), now);
        assert_eq!(depth.get(), later);
    }
    drop(allow);
    drop(pass);
    let (allow, pass) = start();
    assert_eq!(pass.shared.lock().depth.get(), 16);
    fills(&allow, &pass, 16);
    drop(allow);
    drop(pass);
}

#[test]
fn reading_goes_on_while_nobody_asks() {
    let (made, seen) = mpsc::channel();
    let made = Mutex::new(made);
    let data = Dataset::range(0..9).map(move |item| {
        made.lock().send(*item.item().unwrap())?;
        Ok(item)
    });
    let pass = data.prefetch(3).iter();
    for expected in 0..3 {
        assert_eq!(seen.recv_timeout(Duration::from_secs(10)), Ok(expected));
    }
    drop(pass);
}

#[test]
fn the_thread_has_ended_when_the_iterator_is_dropped() {
    for taken in [0, 1, 5] {
        let (data, made) = counted();
        let data = data.prefetch(2);
        let mut pass = data.iter();
        pass.by_ref().take(taken).for_each(|item| drop(item.unwrap()));
        drop(pass);
        drop(data);
        // The source, which the thread owned, has been dropped.
        assert_eq!(Arc::strong_count(&made), 1);
    }
}

#[test]
fn nested_threads_end_too() {
    let (data, made) = counted();
    let pass = data.prefetch(2).batch(3).prefetch(AUTOTUNE).iter();
    assert_eq!(pass.take(4).filter(Result::is_ok).count(), 4);
    assert_eq!(Arc::strong_count(&made), 1);
}

#[test]
fn errors_come_in_their_place() {
    let data = Dataset::range(0..9).map(|item| match item.item() {
        Some(3) => Err("three is refused".into()),
        _ => Ok(item),
    });
    let items: Vec<_> = data.prefetch(8).iter().collect();
    assert_eq!(items.len(), 4);
    assert!(items[..3].iter().all(Result::is_ok));
    assert!(items[3].as_ref().unwrap_err().to_string().contains("three is refused"));
}

#[test]
fn a_panic_becomes_an_error() {
    let data = Dataset::range(0..9).map(|item| {
        assert_ne!(item.item(), Some(&2), "a bug in the pipeline");
        Ok(item)
    });
    let items: Vec<_> = data.prefetch(1).iter().collect();
    assert_eq!(items.len(), 3);
    assert!(matches!(items[2], Err(Error::Panicked)));
}

#[test]
fn a_silent_source_meets_the_deadline() {
    let (release, blocked) = mpsc::channel::<()>();
    let open = move || {
        Box::new(std::iter::from_fn(move || match blocked.recv_timeout(Duration::from_secs(10)) {
            Ok(()) => Some(Ok(1)),
            Err(_) => None,
        })) as Items<i32>
    };
    let mut pass = Prefetched::start(open, &Depth::new(1), Limit::none(), Duration::from_millis(20)).unwrap();
    assert!(matches!(pass.next(), Some(Err(Error::Stalled { .. }))));
    drop(release);
    drop(pass);
}
