//! The conversation on the inherited socket.
#![expect(unsafe_code, reason = "the socket is inherited as a number")]

use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::{BorrowedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use super::{Meeting, failed};
use crate::Result;

/// Asks the manager whose socket PMI_FD names.
pub(super) fn converse(variable: &dyn Fn(&str) -> Option<String>) -> Result<Meeting> {
    let given = variable("PMI_FD").unwrap_or_default();
    let number = given.trim().parse::<RawFd>().ok().filter(|number| *number > 2);
    let number = number.ok_or_else(|| failed("PMI_FD is not the number of a socket", &given))?;
    let is_socket = std::fs::read_link(format!("/proc/self/fd/{number}"));
    if !is_socket.is_ok_and(|target| target.to_string_lossy().starts_with("socket:")) {
        return Err(failed("PMI_FD is not the number of an open socket", &given));
    }
    // SAFETY: the number is that of an open socket, as was just checked, which the process manager left for this
    // conversation; this program opens and closes nothing under that number, and the borrow ends with the statement.
    let socket = unsafe { BorrowedFd::borrow_raw(number) }.try_clone_to_owned();
    let stream =
        socket.map(UnixStream::from).map_err(|error| failed("its socket cannot be used", &error.to_string()))?;
    let limited = stream.set_read_timeout(Some(TIMEOUT)).and_then(|()| stream.set_write_timeout(Some(TIMEOUT)));
    limited.map_err(|error| failed("its socket cannot be used", &error.to_string()))?;
    let is = |name: &str, other: &str| variable(name).is_some_and(|value| Some(value) == variable(other));
    let is_leader = variable("PMI_RANK").is_some_and(|rank| rank.trim() == "0");
    let host = match (is("MPI_LOCALNRANKS", "PMI_SIZE"), is_leader) {
        (true, _) => None,
        (false, true) => Some(variable("MPIR_CVAR_CH3_INTERFACE_HOSTNAME").ok_or_else(|| {
            failed("the job has several hosts, and MPIR_CVAR_CH3_INTERFACE_HOSTNAME does not name this one", "nothing")
        })?),
        (false, false) => Some(String::new()),
    };
    meet(&stream, &stream, host.as_deref())
}

/// Holds the conversation. `host` is this process's own on rank 0, empty on others, `None` if all share one.
fn meet(from: impl Read, mut to: impl Write, host: Option<&str>) -> Result<Meeting> {
    let mut from = BufReader::new(from.take(LONGEST));
    let mut request = |line: &str, field: &str| -> Result<String> {
        let lost = |error: std::io::Error| failed("it does not answer", &error.to_string());
        to.write_all(format!("{line}\n").as_bytes()).map_err(lost)?;
        let mut answer = String::new();
        from.read_line(&mut answer).map_err(lost)?;
        let value = |key: &str| {
            let fields = answer.split_whitespace().filter_map(|field| field.split_once('='));
            fields.into_iter().find(|(name, _)| *name == key).map(|(_, value)| value.to_owned())
        };
        match value(field) {
            Some(found) if value("rc").is_none_or(|code| code == "0") => Ok(found),
            _ => Err(failed("it refused a request", &format!("{line}: {}", answer.trim()))),
        }
    };
    request("cmd=init pmi_version=1 pmi_subversion=1", "cmd")?;
    let job = request("cmd=get_my_kvsname", "kvsname")?;
    let host = match host {
        None => None,
        Some(own) => {
            if !own.is_empty() {
                request(&format!("cmd=put kvsname={job} key={KEY} value={own}"), "cmd")?;
            }
            request("cmd=barrier_in", "cmd")?;
            Some(request(&format!("cmd=get kvsname={job} key={KEY}"), "value")?)
        }
    };
    // A process that ends without it counts as failed.
    request("cmd=finalize", "cmd")?;
    Ok(Meeting { job, host })
}

const KEY: &str = "distribute-host";

/// Longest wait for an answer; a barrier waits for all processes of the job to start.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Bytes of all answers together.
const LONGEST: u64 = 64 * 1024;

#[cfg(test)]
mod tests {
    use super::*;

    fn talk(answers: &str, host: Option<&str>) -> (Result<Meeting>, String) {
        let mut sent = Vec::new();
        let meeting = meet(answers.as_bytes(), &mut sent, host);
        (meeting, String::from_utf8(sent).unwrap())
    }

    const BEGIN: &str = "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0\ncmd=my_kvsname kvsname=kvs_1_0_vm\n";

    #[test]
    fn one_host_needs_the_name_of_the_job_alone() {
        let (meeting, sent) = talk(&format!("{BEGIN}cmd=finalize_ack\n"), None);
        assert_eq!(meeting.unwrap(), Meeting { job: "kvs_1_0_vm".to_owned(), host: None });
        assert_eq!(sent, "cmd=init pmi_version=1 pmi_subversion=1\ncmd=get_my_kvsname\ncmd=finalize\n");
    }

    #[test]
    fn several_hosts_are_told_that_of_rank_0() {
        let end = "cmd=barrier_out\ncmd=get_result rc=0 msg=success value=node1\ncmd=finalize_ack\n";
        let (meeting, sent) = talk(&format!("{BEGIN}cmd=put_result rc=0 msg=success\n{end}"), Some("node1"));
        assert_eq!(meeting.unwrap().host.as_deref(), Some("node1"));
        assert!(sent.contains("cmd=put kvsname=kvs_1_0_vm key=distribute-host value=node1\n"), "{sent}");
        let (meeting, sent) = talk(&format!("{BEGIN}{end}"), Some(""));
        assert_eq!(meeting.unwrap().host.as_deref(), Some("node1"));
        assert!(!sent.contains("cmd=put"), "{sent}");
    }

    #[test]
    fn refusals_and_silence_are_sentences() {
        for (answers, words) in [
            ("", "refused a request"),
            ("cmd=response_to_init rc=-1\n", "refused a request"),
            ("nonsense\n", "refused a request"),
        ] {
            let error = talk(answers, None).0.unwrap_err().to_string();
            assert!(error.contains(words) && error.contains("MASTER_ADDR"), "{error}");
        }
    }
}
