//! Each crate reads the process's environment in one module.

use std::path::Path;

use crate::source;

/// Returns the files of a crate's sources that read the environment, tests left out.
pub(super) fn readers(folder: &Path) -> Result<Vec<String>, String> {
    let mut readers = Vec::new();
    for path in source::files(folder, "rs")? {
        let name = path.strip_prefix(folder).unwrap_or(&path).display().to_string();
        if !name.ends_with("tests.rs") && reads(&source::read(&path)?) {
            readers.push(name);
        }
    }
    Ok(readers)
}

fn reads(text: &str) -> bool {
    let code = source::code(text);
    let code = code.split("#[cfg(test)]\nmod tests").next().unwrap_or_default();
    READS.iter().any(|call| code.contains(call))
}

/// The problem, in words, where more than one file reads the environment.
pub(super) fn problem(name: &str, readers: &[String]) -> Option<String> {
    (readers.len() > 1)
        .then(|| format!("{name} reads the environment in {}; read it in one module", readers.join(", ")))
}

const READS: [&str; 4] = ["env::var(", "env::var_os(", "env::vars(", "env::vars_os("];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_read_is_found_in_code_only() {
        assert!(reads("fn f() { std::env::var_os(\"A\"); }"));
        assert!(!reads("// env::var(\nconst TEXT: &str = \"env::var(\";"));
        assert!(!reads("fn f() {}\n#[cfg(test)]\nmod tests { fn g() { std::env::var(\"A\"); } }"));
    }

    #[test]
    fn a_second_reader_is_a_problem() {
        assert_eq!(problem("a", &["environment.rs".to_owned()]), None);
        let problem = problem("a", &["environment.rs".to_owned(), "b.rs".to_owned()]).unwrap();
        assert!(problem.contains("environment.rs, b.rs"), "{problem}");
    }
}
