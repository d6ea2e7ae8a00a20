use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::sync::mpsc;

use super::*;
use crate::progress::clock::ManualClock;
use crate::progress::{LogWriter, Message};

#[derive(Clone, Default)]
struct Tape(Arc<Mutex<Vec<u8>>>);

impl Tape {
    fn text(&self) -> String {
        String::from_utf8(self.0.lock().clone()).unwrap()
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

#[derive(Default)]
struct Desk {
    stdout: Tape,
    stderr: Tape,
    clock: ManualClock,
    bar: BarSlot,
}

impl Desk {
    fn start(form: Form, is_chief: bool) -> (Progress, Self) {
        let desk = Self::default();
        let (stdout, stderr) = (desk.stdout.clone(), desk.stderr.clone());
        let outputs = Outputs {
            stdout: Box::new(move || Box::new(stdout.clone())),
            stderr: Box::new(move || Box::new(stderr.clone())),
            clock: Box::new(desk.clock.clone()),
            bar: desk.bar.clone(),
            status: None,
        };
        let options =
            Options { title: "mnist".into(), epochs: 2, task: "worker:0".into(), is_chief, ..Options::default() };
        (Progress::with_outputs(options, form, outputs).unwrap(), desk)
    }
}

fn train(progress: &mut Progress, clock: &ManualClock) {
    for epoch in 1..=2 {
        progress.epoch(epoch);
        for step in 1..=100 {
            clock.advance(Duration::from_millis(10));
            progress.step(step, 64, &[("loss", 1.0 / step as f64)]);
        }
        clock.advance(Duration::from_secs(1));
        progress.end_epoch(&[("val_loss", 0.5)]);
    }
}

fn summary() -> Summary {
    Summary { replicas: 2, ..Summary::default() }
}

/// Serves one connection and returns its lines.
fn listener() -> (String, mpsc::Receiver<Vec<Message>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = listener.local_addr().unwrap().to_string();
    let (lines, received) = mpsc::channel();
    std::thread::spawn(move || {
        let (stream, _) = listener.accept().unwrap();
        stream.set_read_timeout(Some(DEADLINE)).unwrap();
        let messages = BufReader::new(stream).lines();
        let messages = messages.map(|line| serde_json::from_str(&line.unwrap()).unwrap());
        lines.send(messages.collect()).unwrap();
    });
    (addr, received)
}

const DEADLINE: Duration = Duration::from_secs(10);

#[test]
fn plain_lines_go_to_stderr_and_the_summary_to_stdout() {
    let (mut progress, desk) = Desk::start(Form::Plain, true);
    train(&mut progress, &desk.clock);
    progress.finish(&summary());
    assert_eq!(desk.stdout.text(), "replicas  2\n");
    let log = desk.stderr.text();
    let lines: Vec<_> = log.lines().map(|line| &line[21..]).collect();
    assert_eq!(
        lines,
        [
            "INFO  mnist",
            "INFO  epoch=1/2 step=100 loss=0.0100 val_loss=0.5000 examples_per_s=6400 elapsed_s=2.0",
            "INFO  epoch=2/2 step=100 loss=0.0100 val_loss=0.5000 examples_per_s=6400 elapsed_s=2.0",
        ]
    );
}

#[test]
fn only_the_chief_reports() {
    let (mut progress, desk) = Desk::start(Form::Plain, false);
    train(&mut progress, &desk.clock);
    progress.finish(&summary());
    assert_eq!(desk.stdout.text() + &desk.stderr.text(), "");
}

#[test]
fn off_still_prints_the_result() {
    let (mut progress, desk) = Desk::start(Form::Off, true);
    train(&mut progress, &desk.clock);
    progress.finish(&summary());
    assert_eq!((desk.stdout.text().as_str(), desk.stderr.text().as_str()), ("replicas  2\n", ""));
}

#[test]
fn the_launcher_gets_every_epoch_and_prints_the_summary_itself() {
    let (addr, received) = listener();
    let (mut progress, desk) = Desk::start(Form::Launcher { addr }, true);
    train(&mut progress, &desk.clock);
    progress.finish(&summary());
    let messages = received.recv_timeout(DEADLINE).unwrap();
    assert!(messages.iter().all(|message| message.task == "worker:0"));
    let events: Vec<_> = messages.into_iter().map(|message| message.event).collect();
    assert_eq!(events.first(), Some(&Event::Begin { title: "mnist".into() }));
    assert_eq!(events.last(), Some(&Event::End { summary: "replicas  2\n".into() }));
    let epochs: Vec<_> = events
        .iter()
        .filter_map(|event| match event {
            Event::Epoch(status) => Some((status.epoch, status.step, status.steps)),
            _ => None,
        })
        .collect();
    assert_eq!(epochs, [(1, 100, Some(100)), (2, 100, Some(100))]);
    assert_eq!(desk.stdout.text() + &desk.stderr.text(), "");
}

#[test]
fn without_a_launcher_the_lines_go_to_the_log_and_it_is_said_once() {
    // The local port of a connection: nothing listens on it, and no other process can take it.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let addr = taken.local_addr().unwrap().to_string();
    let (mut progress, desk) = Desk::start(Form::Launcher { addr: addr.clone() }, true);
    train(&mut progress, &desk.clock);
    progress.finish(&summary());
    let log = desk.stderr.text();
    let sentence = format!("WARN  progress: cannot reach the launcher at {addr} (");
    assert_eq!(log.matches(&sentence).count(), 1, "{log}");
    assert_eq!(log.matches("epoch=1/2").count(), 1, "{log}");
    assert_eq!(log.matches("epoch=2/2").count(), 1, "{log}");
    assert_eq!(desk.stdout.text(), "replicas  2\n");
}

#[test]
fn a_launcher_that_dies_is_replaced_by_the_log() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = listener.local_addr().unwrap().to_string();
    let (mut progress, desk) = Desk::start(Form::Launcher { addr }, true);
    // Unread bytes make the close a reset, which the next write or the one after it notices.
    let stream = listener.accept().unwrap().0;
    let mut byte = [0];
    stream.set_read_timeout(Some(DEADLINE)).unwrap();
    io::Read::read_exact(&mut &stream, &mut byte).unwrap();
    drop((stream, listener));
    let begin = std::time::Instant::now();
    while !desk.stderr.text().contains("lost the launcher") {
        assert!(begin.elapsed() < DEADLINE, "{}", desk.stderr.text());
        train(&mut progress, &desk.clock);
        std::thread::yield_now();
    }
    progress.finish(&summary());
    assert_eq!(desk.stdout.text(), "replicas  2\n");
}

#[test]
fn log_lines_keep_the_bar_whole() {
    let (mut progress, desk) = Desk::start(Form::Bar, true);
    progress.epoch(1);
    let mut log = LogWriter::new(Box::new(desk.stderr.clone()), desk.bar.clone());
    write!(log, "half a line").unwrap();
    writeln!(log, ", and the rest").unwrap();
    write!(log.clone(), "cut off").unwrap();
    drop(log);
    progress.finish(&summary());
    let screen = desk.stderr.text();
    for line in ["half a line, and the rest\n", "cut off\n"] {
        let (before, _) = screen.split_once(line).unwrap();
        assert!(before.is_empty() || before.ends_with(['\r', '\n']), "{screen:?}");
    }
    assert!(screen.ends_with('\n'), "{screen:?}");
}

#[test]
fn every_task_reports_its_vital_signs_and_only_the_chief_the_run() {
    for is_chief in [true, false] {
        let (addr, received) = listener();
        let options = Options { title: "mnist".into(), task: "worker:7".into(), is_chief, ..Options::default() };
        let outputs = Outputs { status: Some(addr), stdout: Box::new(|| Box::new(io::sink())), ..Outputs::standard() };
        let mut progress = Progress::with_outputs(options, Form::Off, outputs).unwrap();
        progress.epoch(1);
        progress.continue_after(5);
        progress.step(6, 64, &[("loss", 0.5)]);
        progress.step(8, 128, &[("loss", 0.25)]);
        progress.end_epoch(&[]);
        progress.finish(&summary());
        let messages = received.recv_timeout(Duration::from_secs(10)).unwrap();
        assert!(messages.iter().all(|message| message.task == "worker:7"), "{messages:?}");
        let vitals = messages.iter().rev().find_map(|message| match &message.event {
            Event::Vitals(vitals) => Some(vitals),
            _ => None,
        });
        let vitals = vitals.unwrap();
        assert_eq!((vitals.steps, vitals.activity, vitals.pid), (3, Activity::Finished, std::process::id()));
        let of_the_run = |event: &Event| !matches!(event, Event::Vitals(_));
        let told: Vec<_> = messages.into_iter().map(|message| message.event).filter(of_the_run).collect();
        if is_chief {
            assert!(told.contains(&Event::Begin { title: "mnist".into() }), "{told:?}");
            let epoch = |event: &Event| matches!(event, Event::Epoch(Status { step: 8, resumed: 5, .. }));
            assert!(told.iter().any(epoch), "{told:?}");
            assert!(told.contains(&Event::End { summary: summary().to_string() }), "{told:?}");
        } else {
            assert_eq!(told, []);
        }
    }
}
