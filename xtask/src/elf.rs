//! Requirements of a program on the machine it is started on, read from its ELF headers.

/// Requirements of a program on the machine it is started on.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Needs {
    /// Shared libraries that the loader must find.
    pub(crate) libraries: Vec<String>,
    /// The oldest glibc that has all of its symbols; none for a program without glibc.
    pub(crate) glibc: Option<Version>,
    /// Whether it is for x86-64; else it is for 64-bit ARM.
    pub(crate) is_x86_64: bool,
}

/// A version of glibc.
pub(crate) type Version = (u32, u32);

/// Libraries that every Linux with glibc has.
const SYSTEM_LIBRARIES: [&str; 7] =
    ["ld-linux-x86-64.so.2", "libc.so.6", "libdl.so.2", "libgcc_s.so.1", "libm.so.6", "libpthread.so.0", "librt.so.1"];

impl Needs {
    /// Returns a library that is neither on every Linux with glibc nor one of these.
    pub(crate) fn foreign_library(&self, known: &[&str]) -> Option<&str> {
        let mut libraries = self.libraries.iter().map(String::as_str);
        libraries.find(|library| !SYSTEM_LIBRARIES.contains(library) && !known.contains(library))
    }

    /// Returns the version of glibc in words.
    pub(crate) fn glibc_in_words(&self) -> String {
        self.glibc.map_or("no glibc".to_owned(), |(major, minor)| format!("glibc {major}.{minor}"))
    }

    /// Reads those of a program for Linux on x86-64 or 64-bit ARM.
    pub(crate) fn of(program: &[u8]) -> Result<Needs, String> {
        let elf = Elf(program);
        let machine = elf.u16(0x12).filter(|machine| [MACHINE_X86_64, MACHINE_AARCH64].contains(machine));
        match machine.filter(|_| program.starts_with(b"\x7fELF\x02\x01")) {
            Some(machine) => elf.needs(machine).ok_or_else(|| "a damaged ELF program".to_owned()),
            None => Err("not an ELF program for x86-64 or 64-bit ARM".to_owned()),
        }
    }
}

/// The version in the name of a set of glibc's symbols, such as `GLIBC_2.34`.
pub(crate) fn glibc_version(name: &str) -> Option<Version> {
    let (major, rest) = name.strip_prefix("GLIBC_")?.split_once('.')?;
    Some((major.parse().ok()?, rest.split('.').next()?.parse().ok()?))
}

struct Elf<'a>(&'a [u8]);

/// A header of a section.
struct Section {
    kind: u32,
    start: usize,
    len: usize,
    link: usize,
    info: usize,
}

const MACHINE_X86_64: u16 = 62;
const MACHINE_AARCH64: u16 = 183;
const SECTION_DYNAMIC: u32 = 6;
const SECTION_VERSIONS_NEEDED: u32 = 0x6fff_fffe;
const DYNAMIC_NEEDED: u64 = 1;

impl Elf<'_> {
    /// `None` where an offset leads out of the file.
    fn needs(&self, machine: u16) -> Option<Needs> {
        let (table, size, count) = (self.offset(0x28)?, usize::from(self.u16(0x3a)?), usize::from(self.u16(0x3c)?));
        let sections = (0..count).map(|at| self.section(table + at * size)).collect::<Option<Vec<_>>>()?;
        let mut needs = Needs { libraries: Vec::new(), glibc: None, is_x86_64: machine == MACHINE_X86_64 };
        for section in &sections {
            let names = sections.get(section.link)?.start;
            match section.kind {
                SECTION_DYNAMIC => {
                    for entry in (section.start..section.start.checked_add(section.len)?).step_by(16) {
                        if self.u64(entry)? == DYNAMIC_NEEDED {
                            needs.libraries.push(self.name(names + self.offset(entry + 8)?)?);
                        }
                    }
                }
                SECTION_VERSIONS_NEEDED => {
                    needs.glibc = self.versions(section, names)?.iter().filter_map(|name| glibc_version(name)).max();
                }
                _ => {}
            }
        }
        Some(needs)
    }

    /// The names of all versions of all libraries.
    fn versions(&self, section: &Section, names: usize) -> Option<Vec<String>> {
        let (mut library, mut found) = (section.start, Vec::new());
        for _ in 0..section.info {
            let mut version = library + self.u32(library + 8)? as usize;
            for _ in 0..self.u16(library + 2)? {
                found.push(self.name(names + self.u32(version + 8)? as usize)?);
                version += self.u32(version + 12)? as usize;
            }
            library += self.u32(library + 12)? as usize;
        }
        Some(found)
    }

    fn section(&self, at: usize) -> Option<Section> {
        Some(Section {
            kind: self.u32(at + 4)?,
            start: self.offset(at + 0x18)?,
            // May be more than the file has: zeros are not in it.
            len: usize::try_from(self.u64(at + 0x20)?).ok()?,
            link: self.u32(at + 0x28)? as usize,
            info: self.u32(at + 0x2c)? as usize,
        })
    }

    fn name(&self, at: usize) -> Option<String> {
        let text = self.0.get(at..)?;
        let end = text.iter().position(|byte| *byte == 0)?;
        Some(String::from_utf8_lossy(&text[..end]).into_owned())
    }

    fn offset(&self, at: usize) -> Option<usize> {
        // Nothing that fits in a file adds up to an overflow.
        self.u64(at).and_then(|value| usize::try_from(value).ok()).filter(|value| *value <= self.0.len())
    }

    fn u64(&self, at: usize) -> Option<u64> {
        self.array(at).map(u64::from_le_bytes)
    }

    fn u32(&self, at: usize) -> Option<u32> {
        self.array(at).map(u32::from_le_bytes)
    }

    fn u16(&self, at: usize) -> Option<u16> {
        self.array(at).map(u16::from_le_bytes)
    }

    fn array<const N: usize>(&self, at: usize) -> Option<[u8; N]> {
        self.0.get(at..at + N)?.try_into().ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_compare_as_numbers() {
        assert_eq!(glibc_version("GLIBC_2.34"), Some((2, 34)));
        assert_eq!(glibc_version("GLIBC_2.3.4"), Some((2, 3)));
        assert!(glibc_version("GLIBC_2.9") < glibc_version("GLIBC_2.17"));
        for other in ["GLIBC_PRIVATE", "GLIBC_ABI_DT_RELR", "GLIBCXX_3.4", "GCC_3.0", "2.34", ""] {
            assert_eq!(glibc_version(other), None, "{other}");
        }
    }

    #[test]
    #[cfg(all(target_os = "linux", target_arch = "x86_64", target_env = "gnu"))]
    fn this_test_needs_glibc() {
        let program = std::fs::read(std::env::current_exe().expect("a program")).expect("its file");
        let needs = Needs::of(&program).expect("an ELF program");
        assert!(needs.libraries.iter().any(|library| library == "libc.so.6"), "{needs:?}");
        let glibc = needs.glibc.expect("a version of glibc");
        assert!(((2, 14)..(3, 0)).contains(&glibc), "{glibc:?}");
    }

    #[test]
    fn what_is_damaged_is_an_error() {
        assert!(Needs::of(b"#!/bin/sh").is_err_and(|error| error.contains("not an ELF")));
        let program = std::fs::read(std::env::current_exe().expect("a program")).expect("its file");
        if Needs::of(&program).is_ok() {
            assert!(Needs::of(&program[..4096]).is_err_and(|error| error.contains("damaged")));
            let mut elsewhere = program;
            elsewhere[0x28..0x30].fill(0xff);
            assert!(Needs::of(&elsewhere).is_err_and(|error| error.contains("damaged")));
        }
    }
}
