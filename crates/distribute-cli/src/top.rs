//! `distribute top`: what the tasks of a running job do, and which ranks others wait for.

mod answer;
mod screen;
mod text;

use std::collections::BTreeSet;
use std::io::{ErrorKind, IsTerminal};
use std::time::Duration;

use distribute_train::status::Place;

use self::answer::{Answer, Source};
use self::screen::Screen;
use crate::args::Top;
use crate::error::Error;
use crate::jobs;
use crate::output::print;

/// Shows one job or several, once or until the user quits.
pub(crate) fn run(args: &Top) -> Result<(), Error> {
    let sources = sources(args)?;
    let terminal = std::io::stdout().is_terminal() && std::io::stdin().is_terminal();
    if args.json {
        return print(&json(&sources)?);
    }
    if let Some(task) = &args.stacks {
        let (source, answer) = one(&sources)?;
        let text = text::describe(source, &answer, colors()) + &stacks(source, &answer, task.as_deref())?;
        return print(&text);
    }
    if args.once || !terminal {
        return print(&describe(&sources, colors())?);
    }
    watch(args, &sources)
}

/// Finds the jobs to ask.
fn sources(args: &Top) -> Result<Vec<Source>, Error> {
    if let Some(given) = &args.address {
        return Ok(vec![Source { place: Place::Address(address(given)?), launcher: None }]);
    }
    let own = jobs::own_user();
    let source = |job: jobs::Job| Source { place: Place::Socket(job.socket), launcher: Some(job.launcher) };
    let Some(pid) = args.pid else {
        let found: Vec<Source> = jobs::of_user(own).into_iter().map(source).collect();
        if !found.is_empty() {
            return Ok(found);
        }
        let folders: Vec<String> = jobs::folders(own).iter().map(|folder| folder.display().to_string()).collect();
        return Err(Error::Top {
            problem: format!(
                "no job of this user runs on this host: no launcher has a socket in {}",
                folders.join(" or ")
            ),
            remedy: "start one by `distribute run`; for a job of another host or user, give the address of its status \
                     page, which `distribute run --status` serves"
                .to_owned(),
        });
    };
    let Some(user) = jobs::user_of(pid) else {
        return Err(Error::Top {
            problem: format!("no process has the id {pid}; the job may have ended"),
            remedy: "give the id of a process `distribute run`, or none, which shows all jobs of this user".to_owned(),
        });
    };
    if user != own && own != 0 {
        return Err(Error::Top {
            problem: format!("process {pid} belongs to the user {user}, and only that user and root can ask its job"),
            remedy: "ask as that user, or give the address of the job's status page".to_owned(),
        });
    }
    match jobs::of_user(user).into_iter().find(|job| job.launcher == pid) {
        Some(job) => Ok(vec![source(job)]),
        None => Err(Error::Top {
            problem: format!("process {pid} is not a launcher that can be asked"),
            remedy:
                "give the id of a process `distribute run`, not of a task; `distribute top` alone finds all of them"
                    .to_owned(),
        }),
    }
}

/// Returns the address of a status page; a port by itself is one of this machine.
fn address(given: &str) -> Result<String, Error> {
    let host_and_port = given.trim().trim_start_matches("http://").split('/').next().unwrap_or_default();
    let is_port = |text: &str| text.parse::<u16>().is_ok_and(|port| port > 0);
    match host_and_port.rsplit_once(':') {
        None if is_port(host_and_port) => Ok(format!("127.0.0.1:{host_and_port}")),
        Some((host, port)) if !host.is_empty() && is_port(port) => Ok(host_and_port.to_owned()),
        _ => Err(Error::Options {
            problem: "this is not the address of a status page",
            given: given.to_owned(),
            expected: "a port, HOST:PORT or http://HOST:PORT, as `distribute run --status` prints it".to_owned(),
        }),
    }
}

/// A question that got no answer.
#[derive(Debug)]
struct Unanswered {
    why: Why,
    error: Error,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Why {
    /// No process listens there: the job has ended.
    Ended,
    /// Not within the time limit; it may be answered later.
    Late,
    Other,
}

impl Why {
    fn of(error: &distribute_train::Error) -> Why {
        let distribute_train::Error::NoAnswer { source, .. } = error else { return Why::Other };
        match source.kind() {
            ErrorKind::NotFound | ErrorKind::ConnectionRefused => Why::Ended,
            ErrorKind::TimedOut => Why::Late,
            _ => Why::Other,
        }
    }
}

impl From<Unanswered> for Error {
    fn from(unanswered: Unanswered) -> Error {
        unanswered.error
    }
}

/// Asks a job for its state.
fn ask(source: &Source) -> Result<Answer, Unanswered> {
    serde_json::from_slice(&fetch(source, "/status.json", ANSWER)?).map_err(|error| {
        let error = Error::Top {
            problem: format!("{} answers with something else than the state of a job: {error}", source.place),
            remedy: "give the address of a status page of this version, as `distribute run --status` prints it"
                .to_owned(),
        };
        Unanswered { why: Why::Other, error }
    })
}

fn fetch(source: &Source, path: &str, within: Duration) -> Result<Vec<u8>, Unanswered> {
    let mut answer = source.place.fetch(path, within);
    if let Err(error @ distribute_train::Error::NoAnswer { .. }) = &answer
        && Why::of(error) == Why::Other
    {
        // A job that ends while it answers closes the connection.
        std::thread::sleep(AGAIN);
        answer = source.place.fetch(path, within);
    }
    answer.map_err(|error| {
        let why = Why::of(&error);
        let error = match error {
            // Its own answer is a sentence.
            distribute_train::Error::Refusal { said, status: 409, .. } => {
                Error::Top { problem: text::clean(&said), remedy: "see `distribute top --help`".to_owned() }
            }
            error => Error::Top {
                problem: text::clean(&error.to_string()),
                remedy: "`distribute top` alone shows the jobs of this user on this host".to_owned(),
            },
        };
        Unanswered { why, error }
    })
}

/// Returns the only job that answers.
fn one(sources: &[Source]) -> Result<(&Source, Answer), Error> {
    match sources {
        [source] => Ok((source, ask(source)?)),
        several => {
            let ids: Vec<String> = several.iter().filter_map(|one| one.launcher).map(|id| id.to_string()).collect();
            Err(Error::Top {
                problem: format!("{} jobs run here, by the launchers {}", several.len(), ids.join(", ")),
                remedy: "name one by --pid".to_owned(),
            })
        }
    }
}

/// Describes all jobs. One that has ended is left out if there are others; one that does not answer is shown with the
/// error.
fn describe(sources: &[Source], colors: bool) -> Result<String, Unanswered> {
    let told = |unanswered: &Unanswered| format!("{}\n", unanswered.error);
    let texts = of_all(sources, |source| Ok(text::describe(source, &ask(source)?, colors)), told)?;
    Ok(texts.join("\n"))
}

/// Returns the state of each job as its launcher answers, one a line. One that has ended is left out if there are
/// others.
fn json(sources: &[Source]) -> Result<String, Error> {
    let line = |source: &Source| Ok(format!("{}\n", String::from_utf8_lossy(&fetch(source, "/status.json", ANSWER)?)));
    let told = |unanswered: &Unanswered| format!("{}\n", serde_json::json!({"error": unanswered.error.to_string()}));
    Ok(of_all(sources, line, told)?.concat())
}

/// Asks all jobs. One that has ended is left out if there are others, and what is `told` of another one takes its
/// place.
///
/// # Errors
/// If none answers: that of the last one that has not ended, else of the last one.
fn of_all(
    sources: &[Source],
    mut ask: impl FnMut(&Source) -> Result<String, Unanswered>,
    told: impl Fn(&Unanswered) -> String,
) -> Result<Vec<String>, Unanswered> {
    let (mut texts, mut answers, mut last) = (Vec::new(), 0, None::<Unanswered>);
    for source in sources {
        match ask(source) {
            Ok(text) => {
                answers += 1;
                texts.push(text);
            }
            Err(unanswered) => {
                if unanswered.why != Why::Ended {
                    texts.push(told(&unanswered));
                }
                if unanswered.why != Why::Ended || last.is_none() {
                    last = Some(unanswered);
                }
            }
        }
    }
    match last {
        Some(unanswered) if answers == 0 => Err(unanswered),
        _ => Ok(texts),
    }
}

/// Returns the stacks of a task, or of those that others wait for.
fn stacks(source: &Source, answer: &Answer, task: Option<&str>) -> Result<String, Error> {
    if let Place::Address(address) = &source.place {
        return Err(Error::Top {
            problem: format!("stacks are read for the user of the job on its own host only, not over {address}"),
            remedy: "run `distribute top --stacks` there, as that user".to_owned(),
        });
    }
    let tasks: Vec<String> = match task {
        Some(task) => vec![task.to_owned()],
        None => blamed(answer),
    };
    if tasks.is_empty() {
        return Ok("\nno rank waits for another: name a task, as in --stacks worker:1\n".to_owned());
    }
    let mut all = String::new();
    for task in &tasks {
        let named = task.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b':' | b'-' | b'_'));
        if !named {
            return Err(Error::Top {
                problem: format!("{:?} is not the name of a task", text::clean(task)),
                remedy: "name one as in the first column".to_owned(),
            });
        }
        let stacks = fetch(source, &format!("/stacks?task={task}"), STACKS);
        match stacks {
            Ok(stacks) => {
                let stacks = String::from_utf8_lossy(&stacks);
                let lines: String = stacks.lines().map(|line| format!("{}\n", text::clean(line))).collect();
                all.push_str(&format!("\nstacks of {task}\n{lines}"));
            }
            // The others may have some.
            Err(Unanswered { error, .. }) if tasks.len() > 1 => all.push_str(&format!("\n{error}\n")),
            Err(Unanswered { error, .. }) => return Err(error),
        }
    }
    Ok(all)
}

/// Returns the tasks that others wait for; where all have entered, those that wait.
fn blamed(answer: &Answer) -> Vec<String> {
    let long = || answer.collectives.iter().filter(|collective| collective.is_long());
    let missing = long().flat_map(|collective| &collective.missing);
    // A rank that waits elsewhere is not the cause.
    let mut tasks: BTreeSet<String> =
        missing.filter(|rank| rank.waits_in.is_none()).filter_map(|rank| rank.task.clone()).collect();
    if tasks.is_empty() && long().next().is_some() {
        tasks = answer.tasks.iter().filter(|task| task.heard_s.is_some()).map(|task| task.task.clone()).collect();
    }
    tasks.into_iter().take(MOST_STACKS).collect()
}

/// Shows the jobs in a terminal until the user quits, or all have ended.
fn watch(args: &Top, sources: &[Source]) -> Result<(), Error> {
    let interval = Duration::from_secs_f64(args.interval);
    let failed = Error::system("draw on the terminal");
    let mut last = describe(sources, colors())?;
    let watched = || -> std::io::Result<Option<Unanswered>> {
        let screen = Screen::open()?;
        loop {
            screen.draw(&last)?;
            if screen.quits_within(interval)? {
                return Ok(None);
            }
            match describe(sources, colors()) {
                Ok(text) => last = text,
                // A job that does not answer for a moment is asked again.
                Err(Unanswered { why: Why::Late, .. }) => {}
                Err(unanswered) => return Ok(Some(unanswered)),
            }
        }
    };
    let ended = { watched }().map_err(failed)?;
    // The last state stays on the terminal.
    print(&last)?;
    match ended {
        None => Ok(()),
        Some(Unanswered { why: Why::Ended, .. }) => print("the job has ended\n"),
        Some(Unanswered { error, .. }) => Err(error),
    }
}

fn colors() -> bool {
    console::colors_enabled()
}

/// Time limit of an answer.
const ANSWER: Duration = Duration::from_secs(5);

/// The pause before a question is asked again whose connection was closed.
const AGAIN: Duration = Duration::from_millis(200);

/// Time limit of the stacks of a task.
const STACKS: Duration = Duration::from_secs(45);

/// Tasks whose stacks are shown without being named.
const MOST_STACKS: usize = 8;

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpListener;

    use super::*;

    /// A server that answers questions in this order, and then listens no more.
    fn server(answers: &'static [&'static str]) -> Source {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let place = Place::Address(listener.local_addr().unwrap().to_string());
        std::thread::spawn(move || {
            for answer in answers {
                let (mut stream, _) = listener.accept().unwrap();
                let _ = stream.read(&mut [0; 1024]).unwrap();
                stream.write_all(answer.as_bytes()).unwrap();
            }
        });
        Source { place, launcher: None }
    }

    fn gone() -> Source {
        Source { place: Place::Socket("/no/such/socket".into()), launcher: None }
    }

    const JOB: &str = "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}";
    const BROKEN: &str = "HTTP/1.1 500 Internal Server Error\r\ncontent-length: 4\r\n\r\nbust";

    #[test]
    fn one_job_that_ends_meanwhile_does_not_hide_the_others() {
        assert_eq!(json(&[gone(), server(&[JOB])]).unwrap(), "{}\n");
        assert!(describe(&[gone(), server(&[JOB])], false).is_ok());
        let error = json(&[gone(), gone()]).unwrap_err().to_string();
        assert!(error.contains("/no/such/socket"), "{error}");
        let text = json(&[server(&[BROKEN]), server(&[JOB])]).unwrap();
        assert!(text.starts_with("{\"error\":\"") && text.ends_with("bust\"}\n{}\n"), "{text}");
    }

    #[test]
    fn the_end_of_a_job_is_told_from_an_answer_that_is_none() {
        let why = |source: Source| describe(&[source], false).unwrap_err().why;
        assert_eq!(why(gone()), Why::Ended);
        assert_eq!(why(server(&[BROKEN])), Why::Other);
        assert_eq!(why(server(&["HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi"])), Why::Other);
        // It ends while it answers.
        assert_eq!(why(server(&[""])), Why::Ended);
    }

    #[test]
    fn addresses_are_read_as_they_are_printed() {
        let read = |given| address(given).unwrap();
        assert_eq!(read("8080"), "127.0.0.1:8080");
        assert_eq!(read("http://127.0.0.1:8080"), "127.0.0.1:8080");
        assert_eq!(read("http://[::1]:80/status.json"), "[::1]:80");
        assert_eq!(read("node-1:80"), "node-1:80");
        for wrong in ["", "node-1", "0", "70000", "node-1:x", ":80"] {
            let error = address(wrong).unwrap_err();
            assert!(error.to_string().contains("not the address of a status page"), "{wrong}");
        }
    }
}
