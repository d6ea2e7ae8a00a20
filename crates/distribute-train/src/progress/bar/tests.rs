use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};

use parking_lot::Mutex;
use proptest::prelude::*;

use super::*;
use crate::progress::clock::ManualClock;

#[derive(Clone, Default)]
struct Tape(Arc<Mutex<Vec<u8>>>);

impl Tape {
    fn take(&self) -> String {
        String::from_utf8(std::mem::take(&mut self.0.lock())).unwrap()
    }
}

impl Write for Tape {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn running() -> Status {
    Status {
        epoch: 2,
        epochs: 5,
        step: 214,
        steps: Some(469),
        examples_per_s: 19_600.0,
        metrics: vec![("loss".into(), 0.1178), ("accuracy".into(), 0.9652)],
        elapsed_s: 1.343,
        resumed: 0,
        total_steps: None,
    }
}

fn finished() -> Status {
    let metrics = [
        ("loss", 0.28412),
        ("accuracy", 0.9163),
        ("val_loss", 0.1312),
        ("val_accuracy", 0.9604),
        ("comm", 0.06),
        ("skew", 0.031),
    ];
    Status {
        epoch: 1,
        epochs: 5,
        step: 469,
        steps: Some(469),
        examples_per_s: 19_431.0,
        metrics: metrics.map(|(name, value)| (name.to_owned(), value)).to_vec(),
        elapsed_s: 3.1,
        resumed: 0,
        total_steps: None,
    }
}

fn bar(width: u16) -> (BarRenderer<Tape>, Tape, ManualClock) {
    let (tape, clock) = (Tape::default(), ManualClock::default());
    let bar = BarRenderer::new(tape.clone(), move || width).with_clock(clock.clone());
    (bar, tape, clock)
}

fn drawn(width: u16, event: &Event) -> String {
    let (mut bar, tape, _) = bar(width);
    bar.render(event).unwrap();
    tape.take()
}

#[test]
fn a_finished_epoch_at_three_widths() {
    let event = Event::Epoch(finished());
    assert_eq!(
        drawn(200, &event),
        "\rEpoch 1/5 ━━━━━━━━━━━━━━━━━━━━ 469/469  3.1s  19.4k ex/s  loss 0.2841  accuracy 0.9163 │ val_loss 0.1312  \
        val_accuracy 0.9604 │ comm 6 %  skew 3 %\n"
    );
    assert_eq!(drawn(80, &event), "\rEpoch 1/5 ━━━━━━━━ 469/469  3.1s  19.4k ex/s  loss 0.2841  accuracy 0.9163\n");
    assert_eq!(drawn(60, &event), "\rEpoch 1/5 ━━━━━ 469/469  3.1s  19.4k ex/s  loss 0.2841\n");
    assert_eq!(drawn(30, &event), "\rEpoch 1/5 469/469  3.1s\n");
    assert_eq!(drawn(6, &event), "\rEpoch\n");
}

#[test]
fn a_running_epoch_at_three_widths() {
    let event = Event::Step(running());
    assert_eq!(
        drawn(200, &event),
        "\rEpoch 2/5 ━━━━━━━━━╸────────── 214/469  ETA 1.6s  19.6k ex/s  loss 0.1178  accuracy 0.9652"
    );
    assert_eq!(drawn(80, &event), "\rEpoch 2/5 ━━━╸──── 214/469  ETA 1.6s  19.6k ex/s  loss 0.1178  accuracy 0.9652");
    assert_eq!(drawn(60, &event), "\rEpoch 2/5 ━━╸── 214/469  ETA 1.6s  19.6k ex/s  loss 0.1178");
}

#[test]
fn the_time_that_is_left_is_that_of_the_steps_of_this_run() {
    // 14 of 214 steps in 1.4 s: 0.1 s each.
    let status = Status { resumed: 200, elapsed_s: 1.4, ..running() };
    let text = drawn(80, &Event::Step(status.clone()));
    assert!(text.contains("214/469  ETA 25.5s"), "{text:?}");
    // Before the first of them nothing is known.
    let text = drawn(80, &Event::Step(Status { step: 200, ..status }));
    assert!(text.contains("200/469  1.4s"), "{text:?}");
}

#[test]
fn counts_line_up_when_numbers_grow() {
    let status = Status { epoch: 2, epochs: 10, step: 7, ..running() };
    let text = drawn(60, &Event::Step(status));
    assert!(text.starts_with("\rEpoch  2/10   7/469  ETA"), "{text:?}");
}

#[test]
fn an_epoch_of_unknown_length_counts_steps() {
    let text = drawn(80, &Event::Step(Status { steps: None, ..running() }));
    assert_eq!(text, "\rEpoch 2/5 214 steps  1.3s  19.6k ex/s  loss 0.1178  accuracy 0.9652");
}

#[test]
fn odd_counts_do_not_break_the_bar() {
    for (step, steps) in [(0, 0), (5, 0), (0, 10), (10, 10), (11, 10), (u64::MAX, 1)] {
        let status = Status { step, steps: Some(steps), elapsed_s: f64::NAN, ..running() };
        for event in [Event::Step(status.clone()), Event::Epoch(status)] {
            let text = drawn(200, &event);
            let cells = text.chars().filter(|c| "━╸─".contains(*c)).count();
            assert_eq!(cells, 20, "{text:?}");
        }
    }
}

#[test]
fn redraws_at_most_ten_times_a_second_and_always_at_the_end_of_an_epoch() {
    let (mut bar, tape, clock) = bar(80);
    let mut draws = 0;
    for _ in 0..1000 {
        bar.render(&Event::Step(running())).unwrap();
        draws += usize::from(!tape.take().is_empty());
        clock.advance(Duration::from_millis(1));
    }
    assert_eq!(draws, 10);
    bar.render(&Event::Epoch(finished())).unwrap();
    assert!(tape.take().ends_with('\n'));
}

#[test]
fn a_shorter_line_wipes_a_longer_one() {
    let (mut bar, tape, clock) = bar(200);
    bar.render(&Event::Step(running())).unwrap();
    let long = tape.take();
    clock.advance(REDRAW_INTERVAL);
    bar.render(&Event::Step(Status { metrics: Vec::new(), ..running() })).unwrap();
    let short = tape.take();
    assert_eq!(short.chars().count(), long.chars().count());
    assert!(short.ends_with("ex/s                              "), "{short:?}");
}

#[test]
fn log_lines_go_above_the_bar() {
    let (mut bar, tape, _) = bar(80);
    let mut log = tape.clone();
    let mut print = || log.write_all(b"worker:1 is late\n").unwrap();
    bar.suspend(&mut print).unwrap();
    assert_eq!(tape.take(), "worker:1 is late\n", "nothing to restore before the first event");
    bar.render(&Event::Step(running())).unwrap();
    let line = tape.take();
    bar.suspend(&mut print).unwrap();
    let blank = " ".repeat(line.chars().count() - 1);
    assert_eq!(tape.take(), format!("\r{blank}\rworker:1 is late\n{line}"));
}

#[test]
fn the_line_follows_a_resized_window() {
    let (tape, width) = (Tape::default(), Arc::new(AtomicU16::new(200)));
    let source = Arc::clone(&width);
    let mut bar =
        BarRenderer::new(tape.clone(), move || source.load(Ordering::Relaxed)).with_clock(ManualClock::default());
    bar.render(&Event::Step(running())).unwrap();
    tape.take();
    width.store(40, Ordering::Relaxed);
    bar.suspend(&mut || ()).unwrap();
    let text = tape.take();
    assert!(text.split('\r').all(|part| part.chars().count() < 40), "{text:?}");
}

#[test]
fn an_open_line_is_ended() {
    let (mut bar, tape, clock) = bar(80);
    bar.render(&Event::Step(running())).unwrap();
    tape.take();
    bar.render(&Event::End { summary: "not on this stream".into() }).unwrap();
    assert_eq!(tape.take(), "\n");
    clock.advance(REDRAW_INTERVAL);
    bar.render(&Event::Step(running())).unwrap();
    tape.take();
    drop(bar);
    assert_eq!(tape.take(), "\n");
}

#[test]
fn colours_come_only_when_allowed() {
    let (bar, tape, _) = bar(80);
    let mut bar = bar.with_colors(true);
    bar.render(&Event::Step(running())).unwrap();
    let text = tape.take();
    assert!(text.contains("\x1b[32m━━━╸\x1b[0m"), "{text:?}");
    let plain = ["\x1b[32m", "\x1b[2m", "\x1b[0m"].iter().fold(text, |text, code| text.replace(code, ""));
    assert_eq!(plain, drawn(80, &Event::Step(running())));
}

proptest! {
    #[test]
    fn a_line_never_fills_its_last_column(
        width in 0_u16..250,
        epoch in any::<u32>(),
        step in any::<u64>(),
        resumed in any::<u64>(),
        steps in any::<Option<u64>>(),
        rate in any::<f64>(),
        value in any::<f64>(),
        name in "\\PC{0,12}",
        done in any::<bool>(),
    ) {
        let metrics = vec![(name, value), ("val_loss".into(), value), ("comm".into(), 0.5)];
        let status = Status {
            epoch,
            epochs: epoch,
            step,
            steps,
            examples_per_s: rate,
            metrics,
            elapsed_s: rate,
            resumed,
            total_steps: None,
        };
        let event = if done { Event::Epoch(status) } else { Event::Step(status) };
        let text = drawn(width, &event);
        let line = text.trim_matches(['\r', '\n']);
        prop_assert!(line.chars().count() <= usize::from(width).saturating_sub(1), "{text:?}");
    }
}
