//! Completions for shells, and manual pages, from the description of the command line.

use std::fs;
use std::path::Path;

use clap::CommandFactory;
use clap_complete::Shell;

use crate::args::Cli;
use crate::error::Error;

/// Returns the completions for a shell.
pub(crate) fn completions(shell: Shell) -> String {
    let mut text = Vec::new();
    clap_complete::generate(shell, &mut visible(), "distribute", &mut text);
    String::from_utf8_lossy(&text).into_owned()
}

/// Writes a page for the program and one for each command; returns their paths, a line each.
///
/// # Errors
/// [`Error::Write`] if a page cannot be written.
pub(crate) fn manual(folder: &Path) -> Result<String, Error> {
    let failed = |source| Error::Write { path: folder.to_owned(), source };
    fs::create_dir_all(folder).map_err(failed)?;
    clap_mangen::generate_to(visible().disable_help_subcommand(true), folder).map_err(failed)?;
    let mut pages = Vec::new();
    for page in fs::read_dir(folder).map_err(failed)? {
        pages.push(format!("{}\n", page.map_err(failed)?.path().display()));
    }
    pages.sort();
    Ok(pages.concat())
}

/// Returns the command line without what the program starts itself.
fn visible() -> clap::Command {
    let all = Cli::command();
    let mut visible = clap::Command::new("distribute").version(env!("CARGO_PKG_VERSION"));
    if let Some(about) = all.get_about() {
        visible = visible.about(about.clone());
    }
    visible.subcommands(all.get_subcommands().filter(|command| !command.is_hide_set()).cloned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn completions_know_the_commands_that_users_call() {
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
            let text = completions(shell);
            assert!(text.contains("doctor") && text.contains("log-dir") && !text.contains("guardian"), "{shell}");
        }
    }

    #[test]
    fn each_command_has_a_page() {
        let folder = tempfile::tempdir().unwrap();
        let written = manual(&folder.path().join("man1")).unwrap();
        let names = ["distribute", "distribute-run", "distribute-doctor", "distribute-explain", "distribute-new"];
        for name in names.into_iter().chain(["distribute-manifest", "distribute-manifest-job"]) {
            assert!(written.contains(&format!("man1/{name}.1\n")), "{written}");
        }
        let page = fs::read_to_string(folder.path().join("man1/distribute-run.1")).unwrap();
        assert!(page.contains("Number of workers") && page.contains("distribute run"), "{page}");
        assert!(!written.contains("guardian"), "{written}");
    }
}
