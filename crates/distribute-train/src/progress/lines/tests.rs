use super::*;
use crate::progress::clock::ManualClock;

fn status() -> Status {
    let metrics =
        [("loss", 0.28412), ("accuracy", 0.9163), ("val_loss", 0.1312), ("val_accuracy", 0.9604), ("comm", 0.06)];
    Status {
        epoch: 1,
        epochs: 5,
        step: 469,
        steps: Some(469),
        examples_per_s: 19_431.4,
        metrics: metrics.map(|(name, value)| (name.to_owned(), value)).to_vec(),
        elapsed_s: 3.1,
        resumed: 0,
        total_steps: None,
    }
}

fn plain_log(events: &[Event]) -> String {
    let mut log = Vec::new();
    let mut renderer = PlainRenderer::new(&mut log, ManualClock::default());
    events.iter().for_each(|event| renderer.render(event).unwrap());
    String::from_utf8(log).unwrap()
}

#[test]
fn a_plain_epoch_is_one_line() {
    assert_eq!(
        plain_log(&[Event::Epoch(status())]),
        "2026-11-20T20:41:07Z INFO  epoch=1/5 step=469 loss=0.2841 accuracy=0.9163 val_loss=0.1312 val_accuracy=0.9604 \
        examples_per_s=19431 comm=0.06 elapsed_s=3.1\n"
    );
}

#[test]
fn plain_lines_hold_no_control_byte_whatever_they_are_given() {
    let hostile = "a\x1b[2J\tb\r\u{9b}c\nd";
    let metrics = vec![(hostile.to_owned(), f64::NAN), ("val_\u{7}".to_owned(), 1e-9)];
    let log = plain_log(&[
        Event::Begin { title: hostile.into() },
        Event::Step(Status { metrics: metrics.clone(), ..status() }),
        Event::Epoch(Status { metrics, ..status() }),
        Event::End { summary: hostile.into() },
    ]);
    assert_eq!(log.lines().count(), 2, "{log:?}");
    assert!(log.chars().all(|c| c == '\n' || !c.is_control()), "{log:?}");
    assert!(log.contains("a_[2J_b__c_d=NaN val__=1.0000e-9"), "{log:?}");
}

#[test]
fn steps_come_at_most_every_thirty_seconds() {
    let clock = ManualClock::default();
    let mut log = Vec::new();
    let mut renderer = PlainRenderer::new(&mut log, clock.clone());
    renderer.render(&Event::Begin { title: "mnist".into() }).unwrap();
    for step in 1..=100 {
        clock.advance(Duration::from_secs(1));
        renderer.render(&Event::Step(Status { step, ..status() })).unwrap();
    }
    renderer.render(&Event::Epoch(status())).unwrap();
    clock.advance(Duration::from_secs(1));
    renderer.render(&Event::Step(Status { step: 1, ..status() })).unwrap();
    let log = String::from_utf8(log).unwrap();
    let steps: Vec<_> = log.lines().filter_map(|line| line.split("step=").nth(1)).collect();
    let steps: Vec<_> = steps.iter().filter_map(|rest| rest.split(' ').next()).collect();
    assert_eq!(steps, ["30", "60", "90", "469"], "{log}");
}

#[test]
fn json_lines_say_the_same() {
    let mut log = Vec::new();
    let mut renderer = JsonRenderer::new(&mut log, ManualClock::default());
    let metrics = vec![("loss".to_owned(), f64::NAN), ("step".to_owned(), 0.5)];
    for event in [
        Event::Begin { title: "mnist".into() },
        Event::Step(status()),
        Event::Epoch(Status { metrics, steps: None, ..status() }),
        Event::End { summary: "replicas  2\n".into() },
    ] {
        renderer.render(&event).unwrap();
    }
    let log = String::from_utf8(log).unwrap();
    let lines: Vec<_> = log.lines().collect();
    assert_eq!(
        lines,
        [
            r#"{"time":"2026-11-20T20:41:07Z","level":"INFO","event":"begin","title":"mnist"}"#,
            concat!(
                r#"{"time":"2026-11-20T20:41:07Z","level":"INFO","event":"epoch","epoch":1,"epochs":5,"step":469,"#,
                r#""steps":null,"loss":"NaN","metric_step":0.5,"examples_per_s":19431.4,"elapsed_s":3.1}"#,
            ),
            r#"{"time":"2026-11-20T20:41:07Z","level":"INFO","event":"end","summary":"replicas  2\n"}"#,
        ]
    );
    for line in lines {
        serde_json::from_str::<serde_json::Value>(line).unwrap();
    }
}
