//! The frames of another process's threads.
//!
//! Each thread is stopped for as long as its frames are read. Its registers come from ptrace, its stack from
//! `/proc/PID/mem`, the rules by which frames are found from the `.eh_frame` of the program and its libraries, which
//! optimized programs have as well, and names from their symbol tables.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

use addr2line::Loader;
use framehop::x86_64::{CacheX86_64, UnwindRegsX86_64, UnwinderX86_64};
use framehop::{ExplicitModuleSectionInfo, Module, Unwinder};
use nix::errno::Errno;
use nix::sys::ptrace;
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use object::read::ReadCache;
use object::read::elf::{ElfFile64, ProgramHeader};
use object::{Endianness, Object, ObjectSection, elf};

/// A frame: a function and where it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Frame {
    function: String,
    /// The file and line, or the library without its folder; none in the program itself.
    place: Option<String>,
}

impl fmt::Display for Frame {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.place {
            Some(place) => write!(f, "{}  {place}", self.function),
            None => f.write_str(&self.function),
        }
    }
}

/// Reads the frames of a process's threads.
pub(super) struct Tracer {
    pid: i32,
    /// The program and its libraries; a sentence if they cannot be read.
    modules: Result<Modules, String>,
}

/// The words that `/proc` adds to the path of a file that has been removed or replaced.
const DELETED: &str = " (deleted)";

struct Modules {
    memory: File,
    unwinder: UnwinderX86_64<Vec<u8>>,
    cache: CacheX86_64,
    /// Mapped code, by the address of its begin.
    mapped: BTreeMap<u64, Mapped>,
    /// Names, by the path of their file; `None` if it has none.
    names: BTreeMap<String, Option<Loader>>,
}

/// Code that is mapped from a file.
#[derive(Debug, Clone)]
struct Mapped {
    end: u64,
    /// Added to the addresses in the file.
    bias: u64,
    /// The path under which the file is read.
    file: String,
    /// The file's name, unless it is the program.
    name: Option<String>,
}

impl Tracer {
    pub(super) fn new(pid: i32) -> Tracer {
        Tracer { pid, modules: Modules::of(pid) }
    }

    /// Returns the frames of a thread, the innermost first.
    ///
    /// # Errors
    /// A sentence that says why there are none.
    pub(super) fn frames(&mut self, thread: i32) -> Result<Vec<Frame>, String> {
        let modules = self.modules.as_mut().map_err(|problem| problem.clone())?;
        let stopped = Stopped::stop(thread).map_err(|error| refusal(self.pid, error))?;
        let addresses = modules.addresses(&stopped);
        drop(stopped);
        let addresses = addresses.map_err(|error| refusal(self.pid, error))?;
        let frames = addresses.into_iter().flat_map(|at| modules.name(at));
        // What called this is the start of a thread or of the program.
        Ok(frames.take_while(|frame| !frame.function.contains("__rust_begin_short_backtrace")).collect())
    }
}

/// A thread that is stopped until this is dropped.
struct Stopped(Pid);

impl Stopped {
    fn stop(thread: i32) -> Result<Stopped, Errno> {
        let thread = Pid::from_raw(thread);
        ptrace::seize(thread, ptrace::Options::empty())?;
        ptrace::interrupt(thread)?;
        let begun = Instant::now();
        while begun.elapsed() < STOP {
            match waitpid(thread, Some(WaitPidFlag::__WALL | WaitPidFlag::WNOHANG))? {
                WaitStatus::StillAlive => std::thread::sleep(Duration::from_micros(200)),
                WaitStatus::Exited(..) | WaitStatus::Signaled(..) => return Err(Errno::ESRCH),
                // A signal that arrived just now is delivered.
                WaitStatus::Stopped(_, signal) if signal != nix::sys::signal::Signal::SIGTRAP => {
                    ptrace::cont(thread, signal)?;
                }
                _ => return Ok(Stopped(thread)),
            }
        }
        Err(Errno::ETIMEDOUT)
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        // Fails only if the thread has ended.
        let _ = ptrace::detach(self.0, None);
    }
}

impl Modules {
    fn of(pid: i32) -> Result<Modules, String> {
        let denied = |error: std::io::Error| {
            let errno = error.raw_os_error().map_or(Errno::EIO, Errno::from_raw);
            refusal(pid, errno)
        };
        let memory = File::open(format!("/proc/{pid}/mem")).map_err(denied)?;
        let maps = fs::read_to_string(format!("/proc/{pid}/maps")).map_err(denied)?;
        let program = fs::read_link(format!("/proc/{pid}/exe")).unwrap_or_default();
        let (mut unwinder, mut mapped) = (UnwinderX86_64::new(), BTreeMap::new());
        for map in maps.lines().filter_map(Map::parse).take(MOST_MAPS) {
            // Libraries are those of its container. Files may have been replaced by newer builds since: the program's
            // own one can still be read, and what is at the path of another is not what is mapped.
            let own = Path::new(map.path) == program;
            if !own && map.path.ends_with(DELETED) {
                continue;
            }
            let file = if own { format!("/proc/{pid}/exe") } else { format!("/proc/{pid}/root{}", map.path) };
            // Without its file, frames are found by the frame pointer only.
            let Some((bias, sections)) = read(&file, map.offset, map.start) else { continue };
            unwinder.add_module(Module::new(map.path.to_owned(), map.start..map.end, bias, sections));
            let name = map.path.rsplit('/').next().filter(|_| !own).map(str::to_owned);
            mapped.insert(map.start, Mapped { end: map.end, bias, file, name });
        }
        Ok(Modules { memory, unwinder, cache: CacheX86_64::new(), mapped, names: BTreeMap::new() })
    }

    /// Returns the addresses of a stopped thread's frames.
    fn addresses(&mut self, thread: &Stopped) -> Result<Vec<u64>, Errno> {
        let registers = ptrace::getregs(thread.0)?;
        let mut read = |address: u64| {
            let mut word = [0; 8];
            self.memory.read_exact_at(&mut word, address).map(|()| u64::from_le_bytes(word)).map_err(drop)
        };
        let start = UnwindRegsX86_64::new(registers.rip, registers.rsp, registers.rbp);
        let mut frames = self.unwinder.iter_frames(registers.rip, start, &mut self.cache, &mut read);
        let mut addresses = Vec::new();
        // An error is the end of what can be read.
        while let Ok(Some(frame)) = frames.next() {
            addresses.push(frame.address_for_lookup());
            if addresses.len() == MOST_FRAMES {
                break;
            }
        }
        Ok(addresses)
    }

    /// Names the functions at an address: several, if some are inlined.
    fn name(&mut self, address: u64) -> Vec<Frame> {
        let unknown = |place: Option<String>| vec![Frame { function: format!("{address:#x}"), place }];
        let found = self.mapped.range(..=address).next_back().filter(|(_, mapped)| address < mapped.end);
        let Some((_, mapped)) = found else { return unknown(Some("in no file".to_owned())) };
        let names = self.names.entry(mapped.file.clone()).or_insert_with(|| Loader::new(&mapped.file).ok());
        let Some(names) = names else { return unknown(mapped.name.clone()) };
        let probe = address.wrapping_sub(mapped.bias);
        let mut frames = Vec::new();
        if let Ok(mut inlined) = names.find_frames(probe) {
            while let Ok(Some(frame)) = inlined.next() {
                let Some(symbol) = frame.function.as_ref().and_then(|name| name.raw_name().ok()) else { continue };
                let place = frame.location.as_ref().and_then(|at| Some(format!("{}:{}", at.file?, at.line?)));
                let place = place.or_else(|| mapped.name.clone());
                frames.push(Frame { function: readable(&symbol), place });
            }
        }
        if frames.is_empty() {
            let Some(symbol) = names.find_symbol(probe) else { return unknown(mapped.name.clone()) };
            frames.push(Frame { function: readable(symbol), place: mapped.name.clone() });
        }
        frames
    }
}

/// A line of `/proc/PID/maps` about code that comes from a file.
struct Map<'a> {
    start: u64,
    end: u64,
    offset: u64,
    path: &'a str,
}

impl Map<'_> {
    fn parse(line: &str) -> Option<Map<'_>> {
        let mut fields = line.splitn(6, ' ');
        let (start, end) = fields.next()?.split_once('-')?;
        let is_code = fields.next()?.as_bytes().get(2) == Some(&b'x');
        let number = |text: &str| u64::from_str_radix(text, 16).ok();
        let offset = number(fields.next()?)?;
        let path = fields.nth(2)?.trim_start();
        (is_code && path.starts_with('/')).then_some(Map { start: number(start)?, end: number(end)?, offset, path })
    }
}

/// Reads what frames are found by, and how far a file's addresses are shifted whose code is mapped at `start`.
fn read(file: &str, offset: u64, start: u64) -> Option<(u64, ExplicitModuleSectionInfo<Vec<u8>>)> {
    // Parts are read as they are needed.
    let cache = ReadCache::new(File::open(file).ok()?);
    let file = ElfFile64::<Endianness, _>::parse(&cache).ok()?;
    let endian = file.endian();
    let is_it = |header: &&elf::ProgramHeader64<Endianness>| {
        let first = header.p_offset(endian);
        header.p_type(endian) == elf::PT_LOAD
            && first & !(PAGE - 1) == offset & !(PAGE - 1)
            && header.p_flags(endian).contains(elf::PF_X)
    };
    let header = file.elf_program_headers().iter().find(is_it)?;
    let bias = start.wrapping_sub(header.p_vaddr(endian).wrapping_sub(header.p_offset(endian).wrapping_sub(offset)));
    let section = |name: &str| {
        let section = file.section_by_name(name)?;
        let data = section.data().ok().filter(|data| data.len() <= LARGEST)?.to_vec();
        Some((section.address()..section.address() + section.size(), data))
    };
    let (eh_frame, eh_frame_hdr, got) = (section(".eh_frame"), section(".eh_frame_hdr"), file.section_by_name(".got"));
    let text = file.section_by_name(".text");
    let (eh_frame_svma, eh_frame) = eh_frame.unzip();
    let (eh_frame_hdr_svma, eh_frame_hdr) = eh_frame_hdr.unzip();
    let sections = ExplicitModuleSectionInfo {
        text_svma: text.map(|text| text.address()..text.address() + text.size()),
        got_svma: got.map(|got| got.address()..got.address() + got.size()),
        eh_frame_svma,
        eh_frame,
        eh_frame_hdr_svma,
        eh_frame_hdr,
        ..ExplicitModuleSectionInfo::default()
    };
    Some((bias, sections))
}

/// Returns the name of a function as it is written, without what tells apart functions of the same name.
fn readable(symbol: &str) -> String {
    format!("{:#}", rustc_demangle::demangle(symbol))
}

/// Says why a process cannot be traced, and what helps.
fn refusal(pid: i32, error: Errno) -> String {
    match error {
        Errno::EPERM | Errno::EACCES => {
            let traced = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
            let tracer = traced.lines().find_map(|line| line.strip_prefix("TracerPid:")).map(str::trim);
            if let Some(tracer) = tracer.filter(|tracer| *tracer != "0") {
                return format!("process {tracer} traces it already, such as a debugger or strace");
            }
            let scope = fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope").unwrap_or_default();
            match scope.trim() {
                "2" | "3" => format!(
                    "kernel.yama.ptrace_scope is {}, which allows no user to trace processes; ask the administrator \
                     for 1, or use a debugger as root",
                    scope.trim()
                ),
                "1" => "kernel.yama.ptrace_scope is 1, and the process was started by another one than the launcher, \
                        such as a shell; let the launcher start the program itself"
                    .to_owned(),
                _ => "the system does not allow it to be traced; a container needs the capability SYS_PTRACE, or a \
                      seccomp profile that allows ptrace and process_vm_readv"
                    .to_owned(),
            }
        }
        Errno::ESRCH => "it has ended".to_owned(),
        Errno::ETIMEDOUT => "the thread could not be stopped: the kernel holds it, for instance in a read of a file \
                             system that hangs"
            .to_owned(),
        other => other.desc().to_owned(),
    }
}

/// How long a thread has to stop.
const STOP: Duration = Duration::from_secs(1);

const MOST_FRAMES: usize = 128;
const MOST_MAPS: usize = 4096;

/// Largest section that is read, in bytes.
const LARGEST: usize = 512 << 20;

const PAGE: u64 = 4096;

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn a_program_whose_file_was_replaced_is_read_as_it_was() {
        let folder = tempfile::tempdir().unwrap();
        let (program, newer) = (folder.path().join("sleep"), folder.path().join("newer"));
        std::fs::copy("/bin/sleep", &program).unwrap();
        let mut child = Command::new(&program).arg("60").spawn().unwrap();
        std::fs::copy(std::env::current_exe().unwrap(), &newer).unwrap();
        std::fs::rename(&newer, &program).unwrap();
        let modules = Modules::of(child.id() as i32);
        child.kill().unwrap();
        child.wait().unwrap();
        match modules {
            Ok(modules) => {
                let own = format!("/proc/{}/exe", child.id());
                assert!(modules.mapped.values().any(|mapped| mapped.file == own), "{:?}", modules.mapped);
                assert!(modules.mapped.values().all(|mapped| !mapped.file.contains("sleep")), "{:?}", modules.mapped);
            }
            Err(refusal) => distribute_testkit::skipped(refusal),
        }
    }
}
