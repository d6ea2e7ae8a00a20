//! Which module of a crate uses which other one, and the circles among them.
//!
//! An arrow is a path that begins with `crate`, `self`, `super` or the name of a module below, in an import, a type, an
//! expression or the tokens of a macro. It leads to the module that defines what the path names: re-exports are
//! followed, so that `crate::Error` is an arrow to `error` and not to `lib.rs`. A re-export alone is not an arrow.
//! Tests do not count.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use proc_macro2::{TokenStream, TokenTree};
use syn::punctuated::Punctuated;
use syn::visit::{self, Visit};
use syn::{
    Attribute, Expr, ExprLit, ImplItem, Item, ItemMod, ItemUse, Lit, Macro, Meta, MetaNameValue, Token, TraitItem,
    UseTree, Visibility,
};

use crate::source;

/// The modules of one library or program, by their paths without `crate`; the root's path is empty.
#[derive(Default)]
pub(super) struct Modules(BTreeMap<String, Module>);

#[derive(Default)]
struct Module {
    /// Imports, by the name that each has here.
    imports: BTreeMap<String, Import>,
    /// Modules of which everything is imported.
    globs: Vec<Vec<String>>,
    /// Paths outside of imports.
    paths: BTreeSet<Vec<String>>,
    /// Names that it defines.
    items: BTreeSet<String>,
    /// Every name in its text outside of imports.
    mentions: BTreeSet<String>,
}

struct Import {
    path: Vec<String>,
    is_public: bool,
}

/// The files where libraries and programs below a folder of sources begin.
pub(super) fn roots(folder: &Path) -> Result<Vec<PathBuf>, String> {
    let first = ["lib.rs", "main.rs"].map(|name| folder.join(name)).into_iter().filter(|path| path.is_file());
    let programs = source::files(&folder.join("bin"), "rs")?;
    Ok(first.chain(programs).collect())
}

impl Modules {
    pub(super) fn read(root: &Path) -> Result<Modules, String> {
        let mut modules = Modules::default();
        let folder = root.parent().unwrap_or(Path::new(""));
        modules.add_file("", root, folder)?;
        Ok(modules)
    }

    pub(super) fn count(&self) -> usize {
        self.0.len()
    }

    /// The sets of modules each of which reaches every other one of its set.
    pub(super) fn circles(&self) -> Vec<BTreeSet<String>> {
        let reached: BTreeMap<&str, BTreeSet<String>> =
            self.0.keys().map(|from| (from.as_str(), self.reached(from))).collect();
        let (mut circles, mut seen) = (Vec::new(), BTreeSet::new());
        for from in self.0.keys().filter(|from| reached[from.as_str()].contains(*from)) {
            if seen.contains(from) {
                continue;
            }
            let both = reached[from.as_str()].iter().filter(|to| reached[to.as_str()].contains(from));
            let circle: BTreeSet<String> = both.cloned().collect();
            seen.extend(circle.iter().cloned());
            circles.push(circle);
        }
        circles
    }

    /// Which module of a set uses which other one of it, as shown to readers.
    pub(super) fn arrows_within(&self, set: &BTreeSet<String>) -> Vec<(String, String)> {
        let of = |from: &String| {
            let to = self.arrows(from).into_iter().filter(|to| set.contains(to));
            let from = shown(from).to_owned();
            to.map(|to| (from.clone(), shown(&to).to_owned())).collect::<Vec<_>>()
        };
        set.iter().flat_map(of).collect()
    }

    /// All modules to which arrows lead from one, over others too.
    fn reached(&self, from: &str) -> BTreeSet<String> {
        let (mut reached, mut next) = (BTreeSet::new(), vec![from.to_owned()]);
        while let Some(module) = next.pop() {
            for to in self.arrows(&module) {
                if reached.insert(to.clone()) {
                    next.push(to);
                }
            }
        }
        reached
    }

    /// The other modules that one uses.
    fn arrows(&self, from: &str) -> BTreeSet<String> {
        let Some(module) = self.0.get(from) else { return BTreeSet::new() };
        let imports = module.imports.iter();
        let used = imports.filter(|(name, import)| !import.is_public || module.mentions.contains(*name));
        let paths = used.map(|(_, import)| &import.path).chain(&module.globs).chain(&module.paths);
        let to = paths.filter_map(|path| self.resolve(from, path, 0));
        to.filter(|to| to != from).collect()
    }

    /// The module that defines what a path names, seen from a module; `None` where that is another crate's.
    fn resolve(&self, from: &str, path: &[String], depth: usize) -> Option<String> {
        let first = path.first()?;
        let (mut at, mut rest) = match first.as_str() {
            "crate" => (String::new(), &path[1..]),
            "self" => (from.to_owned(), &path[1..]),
            "super" => (parent(from).to_owned(), &path[1..]),
            name if self.0.contains_key(&below(from, name)) => (from.to_owned(), path),
            name if depth < DEPTH => {
                let import = self.0.get(from)?.imports.get(name).filter(|import| import.path != path)?;
                let path = [&import.path[..], &path[1..]].concat();
                return self.resolve(from, &path, depth + 1);
            }
            _ => return None,
        };
        while let Some((name, tail)) = rest.split_first() {
            let child = below(&at, name);
            if name == "super" {
                at = parent(&at).to_owned();
            } else if self.0.contains_key(&child) {
                at = child;
            } else if let Some(import) = self.0.get(&at).and_then(|module| module.imports.get(name))
                && depth < DEPTH
            {
                let path = [&import.path[..], tail].concat();
                return self.resolve(&at, &path, depth + 1);
            } else {
                return Some(self.through_globs(&at, name, depth).unwrap_or(at));
            }
            rest = tail;
        }
        Some(at)
    }

    /// The module whose glob import brings a name into a module that does not define it.
    fn through_globs(&self, at: &str, name: &str, depth: usize) -> Option<String> {
        let module = self.0.get(at)?;
        if module.items.contains(name) || depth >= DEPTH {
            return None;
        }
        let sources = module.globs.iter().filter_map(|glob| self.resolve(at, glob, depth + 1));
        sources.filter(|source| source != at).find(|source| {
            let has = |module: &Module| module.items.contains(name) || module.imports.contains_key(name);
            self.0.get(source).is_some_and(has)
        })
    }

    /// Adds the module that is a file, and those below it, which lie in `folder`.
    fn add_file(&mut self, name: &str, file: &Path, folder: &Path) -> Result<(), String> {
        let text = source::read(file)?;
        let parsed = syn::parse_file(&text).map_err(|error| format!("{}: {error}", file.display()))?;
        self.add(name, &parsed.items, file, folder)
    }

    fn add(&mut self, name: &str, items: &[Item], file: &Path, folder: &Path) -> Result<(), String> {
        let mut reader = Reader::default();
        items.iter().for_each(|item| reader.visit_item(item));
        self.0.entry(name.to_owned()).or_default().merge(reader.module);
        for item in reader.below {
            let (name, folder) = (below(name, &item.ident.to_string()), folder.join(item.ident.to_string()));
            let named = named_files(&item.attrs);
            match &item.content {
                Some((_, items)) => self.add(&name, items, file, &folder)?,
                None if named.is_empty() => {
                    let (beside, inside) = (folder.with_extension("rs"), folder.join("mod.rs"));
                    self.add_file(&name, if inside.is_file() { &inside } else { &beside }, &folder)?;
                }
                // One of these or another, as features have it; what lies below is searched where the file is.
                None => {
                    for path in named.iter().map(|path| file.with_file_name(path)) {
                        self.add_file(&name, &path, path.parent().unwrap_or(&folder))?;
                    }
                }
            }
        }
        Ok(())
    }
}

impl Module {
    fn merge(&mut self, other: Module) {
        self.imports.extend(other.imports);
        self.globs.extend(other.globs);
        self.paths.extend(other.paths);
        self.items.extend(other.items);
        self.mentions.extend(other.mentions);
    }
}

/// Takes what one module says from its items, without tests.
#[derive(Default)]
struct Reader<'ast> {
    module: Module,
    below: Vec<&'ast ItemMod>,
}

impl Reader<'_> {
    fn import(&mut self, tree: &UseTree, mut path: Vec<String>, is_public: bool) {
        match tree {
            UseTree::Path(part) => {
                path.push(part.ident.to_string());
                self.import(&part.tree, path, is_public);
            }
            UseTree::Name(last) if last.ident == "self" => {
                self.add_import(path.last().cloned().unwrap_or_default(), path, is_public);
            }
            UseTree::Name(last) => {
                path.push(last.ident.to_string());
                self.add_import(last.ident.to_string(), path, is_public);
            }
            UseTree::Rename(last) => {
                if last.ident != "self" {
                    path.push(last.ident.to_string());
                }
                // Traits that are imported for their methods alone have no name of their own.
                let name = if last.rename == "_" { format!("_{}", last.ident) } else { last.rename.to_string() };
                self.add_import(name, path, is_public);
            }
            UseTree::Glob(_) => self.module.globs.push(path),
            UseTree::Group(group) => {
                group.items.iter().for_each(|tree| self.import(tree, path.clone(), is_public));
            }
        }
    }

    fn add_import(&mut self, name: String, path: Vec<String>, is_public: bool) {
        self.module.imports.insert(name, Import { path, is_public });
    }

    /// Macros' tokens may hold paths too.
    fn tokens(&mut self, tokens: TokenStream) {
        let mut path: Vec<String> = Vec::new();
        let mut colons = 0;
        for token in tokens {
            match token {
                TokenTree::Ident(name) => {
                    self.module.mentions.insert(name.to_string());
                    if colons != 2 {
                        self.end_path(&mut path);
                    }
                    path.push(name.to_string());
                    colons = 0;
                }
                TokenTree::Punct(punct) if punct.as_char() == ':' => colons += 1,
                TokenTree::Group(group) => {
                    self.end_path(&mut path);
                    self.tokens(group.stream());
                }
                _ => self.end_path(&mut path),
            }
        }
        self.end_path(&mut path);
    }

    fn end_path(&mut self, path: &mut Vec<String>) {
        if path.len() > 1 {
            self.module.paths.insert(std::mem::take(path));
        }
        path.clear();
    }
}

impl<'ast> Visit<'ast> for Reader<'ast> {
    fn visit_item(&mut self, item: &'ast Item) {
        let (attributes, name) = described(item);
        if is_test(attributes) {
            return;
        }
        self.module.items.extend(name.map(ToString::to_string));
        match item {
            Item::Mod(item) => self.below.push(item),
            _ => visit::visit_item(self, item),
        }
    }

    fn visit_impl_item(&mut self, item: &'ast ImplItem) {
        let attributes = match item {
            ImplItem::Fn(item) => &item.attrs[..],
            ImplItem::Const(item) => &item.attrs,
            _ => &[],
        };
        if !is_test(attributes) {
            visit::visit_impl_item(self, item);
        }
    }

    fn visit_trait_item(&mut self, item: &'ast TraitItem) {
        let is_test = matches!(item, TraitItem::Fn(item) if is_test(&item.attrs));
        if !is_test {
            visit::visit_trait_item(self, item);
        }
    }

    fn visit_item_use(&mut self, item: &'ast ItemUse) {
        if item.leading_colon.is_none() && !is_test(&item.attrs) {
            self.import(&item.tree, Vec::new(), !matches!(item.vis, Visibility::Inherited));
        }
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        if path.leading_colon.is_none() && path.segments.len() > 1 {
            self.module.paths.insert(path.segments.iter().map(|segment| segment.ident.to_string()).collect());
        }
        visit::visit_path(self, path);
    }

    fn visit_ident(&mut self, ident: &'ast proc_macro2::Ident) {
        self.module.mentions.insert(ident.to_string());
    }

    fn visit_visibility(&mut self, _: &'ast Visibility) {
        // `pub(in path)` says who may use an item, not what it uses.
    }

    fn visit_attribute(&mut self, _: &'ast Attribute) {
        // Documentation and derives name no modules.
    }

    fn visit_macro(&mut self, found: &'ast Macro) {
        self.visit_path(&found.path);
        self.tokens(found.tokens.clone());
    }
}

/// An item's attributes and its name, if it has one.
fn described(item: &Item) -> (&[Attribute], Option<&proc_macro2::Ident>) {
    match item {
        Item::Const(item) => (&item.attrs, Some(&item.ident)),
        Item::Enum(item) => (&item.attrs, Some(&item.ident)),
        Item::Fn(item) => (&item.attrs, Some(&item.sig.ident)),
        Item::Impl(item) => (&item.attrs, None),
        Item::Macro(item) => (&item.attrs, item.ident.as_ref()),
        Item::Mod(item) => (&item.attrs, None),
        Item::Static(item) => (&item.attrs, Some(&item.ident)),
        Item::Struct(item) => (&item.attrs, Some(&item.ident)),
        Item::Trait(item) => (&item.attrs, Some(&item.ident)),
        Item::Type(item) => (&item.attrs, Some(&item.ident)),
        Item::Union(item) => (&item.attrs, Some(&item.ident)),
        Item::Use(item) => (&item.attrs, None),
        _ => (&[], None),
    }
}

/// Whether an item is there for tests and fuzzers alone: `#[cfg(test)]`, `all` of that and more, or `any` of both.
fn is_test(attributes: &[Attribute]) -> bool {
    let names_test = |attribute: &Attribute| match &attribute.meta {
        Meta::List(list) if list.path.is_ident("cfg") => {
            let conditions = list.parse_args_with(Punctuated::<Meta, Token![,]>::parse_terminated);
            conditions.is_ok_and(|conditions| conditions.iter().any(requires_test))
        }
        path => path.path().is_ident("test"),
    };
    attributes.iter().any(names_test)
}

fn requires_test(condition: &Meta) -> bool {
    match condition {
        Meta::Path(path) => path.is_ident("test") || path.is_ident("fuzzing"),
        Meta::List(list) => {
            let conditions = list.parse_args_with(Punctuated::<Meta, Token![,]>::parse_terminated);
            conditions.is_ok_and(|conditions| match list.path.get_ident() {
                Some(name) if name == "all" => conditions.iter().any(requires_test),
                Some(name) if name == "any" => conditions.iter().all(requires_test),
                _ => false,
            })
        }
        _ => false,
    }
}

/// The files that `#[path = ".."]` names, also where a condition stands before it.
fn named_files(attributes: &[Attribute]) -> Vec<String> {
    let conditional = |attribute: &Attribute| match &attribute.meta {
        Meta::List(list) if list.path.is_ident("cfg_attr") => {
            let parts = list.parse_args_with(Punctuated::<Meta, Token![,]>::parse_terminated);
            parts.map_or_else(|_| Vec::new(), |parts| parts.into_iter().skip(1).collect())
        }
        meta => vec![meta.clone()],
    };
    let path = |meta: Meta| match meta {
        Meta::NameValue(MetaNameValue { path, value: Expr::Lit(ExprLit { lit: Lit::Str(text), .. }), .. }) => {
            path.is_ident("path").then(|| text.value())
        }
        _ => None,
    };
    attributes.iter().flat_map(conditional).filter_map(path).collect()
}

fn below(module: &str, name: &str) -> String {
    if module.is_empty() { name.to_owned() } else { format!("{module}::{name}") }
}

fn parent(module: &str) -> &str {
    module.rsplit_once("::").map_or("", |(parent, _)| parent)
}

/// A module's name for readers.
pub(super) fn shown(module: &str) -> &str {
    if module.is_empty() { "crate" } else { module }
}

/// How many re-exports a name may pass.
const DEPTH: usize = 16;

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// The circles of a crate of these files.
    fn circles(files: &[(&str, &str)]) -> Vec<Vec<String>> {
        let folder = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = folder.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let [root] = &roots(folder.path()).unwrap()[..] else { panic!("one root") };
        let circles = Modules::read(root).unwrap().circles();
        circles.into_iter().map(|circle| circle.into_iter().collect()).collect()
    }

    #[test]
    fn a_circle_is_found_over_re_exports_and_paths_in_bodies_and_macros() {
        let files = [
            ("lib.rs", "mod a; mod b; mod c; mod d;\npub use b::{Beta, other};\npub use d::Delta;"),
            ("a.rs", "use crate::Beta;\npub struct Alpha(Beta);"),
            ("b.rs", "pub struct Beta;\npub fn other() { crate::c::run() }"),
            ("c.rs", "pub fn run() { println!(\"{}\", crate::a::Alpha::NAME) }"),
            ("d.rs", "pub struct Delta(crate::a::Alpha);"),
        ];
        assert_eq!(circles(&files), [["a", "b", "c"]]);
    }

    #[test]
    fn a_re_export_is_an_arrow_only_where_the_name_is_used() {
        let child = ("a/part.rs", "use super::Whole;\npub struct Part(Box<Whole>);");
        let apart = [("lib.rs", "mod a;"), ("a.rs", "mod part;\npub use part::Part;\npub struct Whole;"), child];
        assert_eq!(circles(&apart), [[""; 0]; 0]);
        let whole = "mod part;\npub use part::Part;\npub struct Whole(Part);";
        assert_eq!(circles(&[("lib.rs", "mod a;"), ("a.rs", whole), child]), [["a", "a::part"]]);
    }

    #[test]
    fn tests_and_other_crates_are_no_arrows() {
        let files = [
            ("lib.rs", "mod a; mod b;\npub use elsewhere::Thing;"),
            (
                "a.rs",
                "pub fn f() {}\n#[cfg(test)]\nmod tests { use crate::b::g; }\n#[cfg(all(test, x))]\nuse crate::b;\n\
                 #[cfg(any(test, fuzzing))]\nmod fuzz { use crate::b::g; }",
            ),
            ("b.rs", "use crate::Thing;\npub fn g() { crate::a::f() }"),
        ];
        assert_eq!(circles(&files), [[""; 0]; 0]);
    }

    #[test]
    fn files_that_attributes_name_are_read() {
        let lib = "mod a;\n#[cfg_attr(x, path = \"c/one.rs\")]\n#[cfg_attr(not(x), path = \"c/two.rs\")]\nmod b;";
        let one = ("c/one.rs", "mod part;\nuse crate::a;");
        let files = [("lib.rs", lib), ("a.rs", "use crate::b;"), one, ("c/two.rs", ""), ("c/part.rs", "use crate::a;")];
        assert_eq!(circles(&files), [["a", "b"]]);
    }

    #[test]
    fn globs_supers_and_modules_within_files_are_followed() {
        let files = [
            ("main.rs", "mod a;\nmod b { pub use crate::a::inner::*; pub struct Bee; }"),
            ("a.rs", "pub mod inner { use super::super::b::{self, Bee}; pub struct In(Bee); }\nuse self::inner::In;"),
        ];
        assert_eq!(circles(&files), [["a::inner", "b"]]);
    }
}
