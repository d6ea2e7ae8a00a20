//! Collects the Rust of docs/ for the tests of `src/lib.rs`.
//!
//! Each block of a page or guide is a test. The blocks of a tutorial are the pieces of one program, so they are one
//! test, which runs in a folder of its own. A comment that begins with `<!-- hidden` has lines that precede the next
//! block.

use std::error::Error;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::{env, fs};

fn main() -> Result<(), Box<dyn Error>> {
    let docs = Path::new(&env::var("CARGO_MANIFEST_DIR")?).join("../../docs");
    let (pages, guides) = (modules(&docs, fragments)?, modules(&docs.join("guide"), fragments)?);
    let tutorials = modules(&docs.join("tutorials"), program)?;
    let text = format!("mod pages {{\n{pages}}}\n\nmod guides {{\n{guides}}}\n\nmod tutorials {{\n{tutorials}}}\n");
    fs::write(Path::new(&env::var("OUT_DIR")?).join("docs.rs"), text)?;
    println!("cargo::rerun-if-changed=build.rs\ncargo::rerun-if-changed={}", docs.display());
    Ok(())
}

/// A block of Rust, with the language and its flags, such as `rust,no_run`.
struct Block {
    flags: String,
    hidden: String,
    code: String,
}

/// Returns a module for each page of a folder that has tests, with the tests as its documentation.
fn modules(folder: &Path, tests: impl Fn(Vec<Block>) -> Vec<(String, String)>) -> Result<String, Box<dyn Error>> {
    let pages: Result<Vec<PathBuf>, _> = fs::read_dir(folder)?.map(|entry| entry.map(|entry| entry.path())).collect();
    let mut pages = pages?;
    pages.retain(|path| path.extension().is_some_and(|extension| extension == "md"));
    pages.sort();
    let mut modules = String::new();
    for page in pages {
        let blocks = blocks(&fs::read_to_string(&page)?);
        if blocks.is_empty() {
            continue;
        }
        let mut documentation = String::new();
        for (flags, code) in tests(blocks) {
            writeln!(documentation, "```{flags}\n{code}\n```\n")?;
        }
        let name = page.file_stem().unwrap_or_default().display();
        writeln!(modules, "    #[doc = {documentation:?}]\n    mod {name} {{}}")?;
    }
    Ok(modules)
}

/// Returns a test for each block of a page.
fn fragments(blocks: Vec<Block>) -> Vec<(String, String)> {
    let end = "Ok::<(), distribute::Error>(())";
    let fragment = |Block { flags, hidden, code }| match code {
        code if code.contains("fn main()") => (flags, hidden + &code),
        code => (flags, hidden + &code + end),
    };
    blocks.into_iter().map(fragment).collect()
}

/// Returns the program of a tutorial as a test.
fn program(blocks: Vec<Block>) -> Vec<(String, String)> {
    let flags = blocks.iter().map(|block| block.flags.clone()).max_by_key(String::len).unwrap_or_default();
    let code: String = blocks.into_iter().map(|block| block.hidden + &block.code).collect();
    let code = code.replace("fn main()", "pub fn main()");
    let main = "fn main() -> std::process::ExitCode {\n\
        let folder = tempfile::tempdir().unwrap();\n\
        std::env::set_current_dir(&folder).unwrap();\n\
        std::process::Termination::report(program::main())\n}";
    vec![(flags, format!("mod program {{\n{code}}}\n\n{main}"))]
}

/// Returns the blocks of Rust of a page.
fn blocks(page: &str) -> Vec<Block> {
    let until = |lines: &mut std::str::Lines<'_>, end: &str| -> String {
        lines.by_ref().take_while(|line| *line != end).flat_map(|line| [line, "\n"]).collect()
    };
    let (mut blocks, mut hidden, mut lines) = (Vec::new(), String::new(), page.lines());
    while let Some(line) = lines.next() {
        if line == "<!-- hidden" {
            hidden = until(&mut lines, "-->");
        } else if let Some(flags) = line.strip_prefix("```") {
            let code = until(&mut lines, "```");
            if flags.starts_with("rust") {
                blocks.push(Block { flags: flags.to_owned(), hidden: std::mem::take(&mut hidden), code });
            }
        }
    }
    blocks
}
