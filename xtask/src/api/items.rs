//! Walks from a crate's root over everything that its users can name.

use std::collections::BTreeSet;

use serde_json::Value;

use super::print::{bounds, flag, generics, list, only, path, qualifiers, signature, text, ty};

/// One line of a crate's interface.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Line {
    pub(super) path: String,
    pub(super) text: String,
    /// Whether it is an item of its own, as opposed to a field, a variant or an implementation.
    pub(super) is_item: bool,
}

/// The lines of a crate in the order of their paths.
pub(super) fn lines(document: &Value) -> Result<Vec<Line>, String> {
    let version = document["format_version"].as_u64().unwrap_or(0);
    if !VERSIONS.contains(&version) {
        let known = format!("{} to {}", VERSIONS.start(), VERSIONS.end());
        return Err(format!("rustdoc writes format {version}, this reads {known}; see xtask/src/api/print.rs"));
    }
    let mut walk =
        Walk { index: &document["index"], paths: &document["paths"], lines: BTreeSet::new(), open: Vec::new() };
    let root = walk.item(&document["root"]).ok_or("rustdoc's JSON has no root")?;
    walk.module(root, text(&root["name"]));
    Ok(walk.lines.into_iter().collect())
}

struct Walk<'a> {
    index: &'a Value,
    paths: &'a Value,
    lines: BTreeSet<Line>,
    /// Modules that are being walked, so that re-exports of each other end.
    open: Vec<u64>,
}

impl<'a> Walk<'a> {
    fn item(&self, id: &Value) -> Option<&'a Value> {
        self.index.get(id.as_u64()?.to_string())
    }

    fn items(&self, ids: &Value) -> Vec<&'a Value> {
        list(ids).iter().filter_map(|id| self.item(id)).collect()
    }

    fn add(&mut self, path: &str, text: String) {
        self.lines.insert(Line { path: path.to_owned(), text, is_item: true });
    }

    fn add_part(&mut self, path: &str, text: String) {
        self.lines.insert(Line { path: path.to_owned(), text, is_item: false });
    }

    fn module(&mut self, item: &'a Value, path: &str) {
        let id = item["id"].as_u64().unwrap_or(u64::MAX);
        if self.open.contains(&id) {
            return;
        }
        self.open.push(id);
        for child in list(&item["inner"]["module"]["items"]) {
            if let Some(child) = self.item(child) {
                self.child(child, path, None);
            }
        }
        self.open.pop();
    }

    /// An item of a module, under another name where it is re-exported so.
    fn child(&mut self, item: &'a Value, module: &str, name: Option<&str>) {
        let path = format!("{module}::{}", name.unwrap_or(text(&item["name"])));
        let Some((kind, inner)) = only(&item["inner"]) else { return };
        match kind {
            "module" => {
                self.add(&path, format!("pub mod {path}"));
                self.module(item, &path);
            }
            "use" => self.re_export(inner, module),
            "struct" | "union" => self.structure(item, kind, inner, &path),
            "enum" => self.enumeration(item, inner, &path),
            "trait" => self.interface(inner, &path),
            "macro" => self.add(&path, format!("pub macro {path}")),
            "proc_macro" => self.add(&path, format!("pub macro {path} ({})", text(&inner["kind"]))),
            _ => {
                if let Some(line) = leaf(kind, inner, &path) {
                    self.add(&path, format!("pub {line}"));
                }
            }
        }
    }

    fn re_export(&mut self, inner: &'a Value, module: &str) {
        let target = self.item(&inner["id"]);
        match (target, flag(inner, "is_glob")) {
            (Some(target), true) => self.module(target, module),
            (Some(target), false) => self.child(target, module, Some(text(&inner["name"]))),
            (None, is_glob) => {
                let known = &self.paths[inner["id"].as_u64().unwrap_or_default().to_string()]["path"];
                let known: Vec<&str> = list(known).iter().map(text).collect();
                let from = if known.is_empty() { text(&inner["source"]).to_owned() } else { known.join("::") };
                let name = if is_glob { "*" } else { text(&inner["name"]) };
                let path = format!("{module}::{name}");
                self.add(&path, format!("pub use {path} = {from}"));
            }
        }
    }

    fn structure(&mut self, item: &'a Value, kind: &str, inner: &'a Value, path: &str) {
        let (params, clauses) = generics(&inner["generics"]);
        let exhaustive = exhaustive(item);
        let tuple = list(&inner["kind"]["tuple"]);
        let shown: Vec<String> =
            tuple.iter().map(|id| self.field(id).map_or("_".to_owned(), |of| format!("pub {of}"))).collect();
        let shown = if tuple.is_empty() { String::new() } else { format!("({})", shown.join(", ")) };
        self.add(path, format!("{exhaustive}pub {kind} {path}{params}{shown}{clauses}"));
        let fields = if kind == "union" { &inner["fields"] } else { &inner["kind"]["plain"]["fields"] };
        for field in self.items(fields) {
            let path = format!("{path}::{}", text(&field["name"]));
            self.add_part(&path, format!("pub {path}: {}", ty(&field["inner"]["struct_field"])));
        }
        self.implementations(&inner["impls"], path);
    }

    fn enumeration(&mut self, item: &'a Value, inner: &'a Value, path: &str) {
        let (params, clauses) = generics(&inner["generics"]);
        self.add(path, format!("{}pub enum {path}{params}{clauses}", exhaustive(item)));
        for variant in self.items(&inner["variants"]) {
            let (name, kind) = (text(&variant["name"]), &variant["inner"]["variant"]["kind"]);
            let fields = match only(kind) {
                Some(("tuple", ids)) => {
                    let fields = list(ids).iter().map(|id| self.field(id).unwrap_or("_".to_owned()));
                    format!("({})", fields.collect::<Vec<_>>().join(", "))
                }
                Some((_, inner)) => {
                    let fields = self.items(&inner["fields"]).into_iter();
                    let fields = fields
                        .map(|field| format!("{}: {}", text(&field["name"]), ty(&field["inner"]["struct_field"])));
                    format!(" {{ {} }}", fields.collect::<Vec<_>>().join(", "))
                }
                None => String::new(),
            };
            let path = format!("{path}::{name}");
            self.add_part(&path, format!("{}pub variant {path}{fields}", exhaustive(variant)));
        }
        self.implementations(&inner["impls"], path);
    }

    fn interface(&mut self, inner: &'a Value, path: &str) {
        let (params, clauses) = generics(&inner["generics"]);
        let above = bounds(&inner["bounds"]);
        let above = if above.is_empty() { above } else { format!(": {above}") };
        let is_unsafe = if flag(inner, "is_unsafe") { "unsafe " } else { "" };
        self.add(path, format!("pub {is_unsafe}trait {path}{params}{above}{clauses}"));
        for item in self.items(&inner["items"]) {
            let path = format!("{path}::{}", text(&item["name"]));
            let Some((kind, inner)) = only(&item["inner"]) else { continue };
            if let Some(line) = leaf(kind, inner, &path) {
                // What has a body need not be written by who implements the trait.
                let provided = if flag(inner, "has_body") { "provided " } else { "" };
                self.add(&path, format!("pub {provided}{line}"));
            }
        }
    }

    /// Methods and traits, but for those that every type has.
    fn implementations(&mut self, ids: &'a Value, path: &str) {
        for item in self.items(ids) {
            let inner = &item["inner"]["impl"];
            if flag(inner, "is_synthetic") || !inner["blanket_impl"].is_null() {
                continue;
            }
            let (params, clauses) = generics(&inner["generics"]);
            if inner["trait"].is_null() {
                self.methods(inner, path, &clauses);
            } else {
                let (of, to) = (self::path(&inner["trait"]), ty(&inner["for"]));
                let unless = if flag(inner, "is_negative") { "!" } else { "" };
                // Sorts after the items of the type.
                self.add_part(&format!("{path}::~"), format!("impl{params} {unless}{of} for {path} as {to}{clauses}"));
            }
        }
    }

    fn methods(&mut self, inner: &'a Value, path: &str, clauses: &str) {
        let of = ty(&inner["for"]);
        // Where only some types of a generic one have the methods, that is part of their signature.
        let of = of.split_once('<').map_or(String::new(), |(_, args)| format!(" of <{args}"));
        for item in self.items(&inner["items"]) {
            let path = format!("{path}::{}", text(&item["name"]));
            let Some((kind, inner)) = only(&item["inner"]) else { continue };
            if let Some(line) = leaf(kind, inner, &path).filter(|_| item["visibility"] == "public") {
                self.add(&path, format!("pub {line}{of}{clauses}"));
            }
        }
    }

    /// The type of a field that can be named.
    fn field(&self, id: &Value) -> Option<String> {
        self.item(id).map(|field| ty(&field["inner"]["struct_field"]))
    }
}

/// An item without items of its own.
fn leaf(kind: &str, inner: &Value, path: &str) -> Option<String> {
    let (params, clauses) = generics(&inner["generics"]);
    Some(match kind {
        "function" => {
            let before = qualifiers(&inner["header"]);
            format!("{before}fn {path}{params}{}{clauses}", signature(&inner["sig"], true))
        }
        "type_alias" => format!("type {path}{params} = {}{clauses}", ty(&inner["type"])),
        "constant" | "assoc_const" => format!("const {path}: {}", ty(&inner["type"])),
        "static" => {
            let mutable = if flag(inner, "is_mutable") { "mut " } else { "" };
            format!("static {mutable}{path}: {}", ty(&inner["type"]))
        }
        "assoc_type" => {
            let bounds = bounds(&inner["bounds"]);
            let bounds = if bounds.is_empty() { bounds } else { format!(": {bounds}") };
            let default = if inner["type"].is_null() { String::new() } else { format!(" = {}", ty(&inner["type"])) };
            format!("type {path}{params}{bounds}{default}{clauses}")
        }
        _ => return None,
    })
}

fn exhaustive(item: &Value) -> &'static str {
    if list(&item["attrs"]).iter().any(|attribute| attribute == "non_exhaustive") { "#[non_exhaustive] " } else { "" }
}

/// rustdoc's formats that this reads.
const VERSIONS: std::ops::RangeInclusive<u64> = 57..=57;

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn item(id: u64, name: &str, inner: Value) -> Value {
        json!({"id": id, "name": name, "visibility": "public", "attrs": [], "inner": inner})
    }

    /// The lines of a crate `x` whose private module defines a struct with a method, re-exported as `Thing`.
    fn printed(argument: &str) -> Vec<String> {
        let none = json!({"params": [], "where_predicates": []});
        let method = json!({"function": {
            "sig": {"inputs": [["count", {"primitive": argument}]], "output": null}, "generics": none,
            "header": {"is_const": true, "is_unsafe": false, "is_async": false, "abi": "Rust"}, "has_body": true
        }});
        let methods = json!({"impl": {"trait": null, "for": {"resolved_path": {"path": "Inner", "id": 3, "args": null}},
            "items": [5], "generics": none, "is_synthetic": false, "blanket_impl": null}});
        let document = json!({"root": 0, "format_version": 57, "paths": {"9": {"path": ["y", "Other"]}}, "index": {
            "0": item(0, "x", json!({"module": {"items": [1, 2]}})),
            "1": item(1, "", json!({"use": {"source": "inner::Inner", "name": "Thing", "id": 3, "is_glob": false}})),
            "2": item(2, "", json!({"use": {"source": "y::Other", "name": "Other", "id": 9, "is_glob": false}})),
            "3": item(3, "Inner", json!({"struct": {
                "kind": {"plain": {"fields": [6], "has_stripped_fields": true}}, "generics": none, "impls": [4]
            }})),
            "4": item(4, "", methods),
            "5": item(5, "new", method),
            "6": item(6, "size", json!({"struct_field": {"primitive": "usize"}}))
        }});
        lines(&document).unwrap().into_iter().map(|line| line.text).collect()
    }

    #[test]
    fn re_exported_items_are_printed_where_users_find_them() {
        let expected = [
            "pub use x::Other = y::Other",
            "pub struct x::Thing",
            "pub const fn x::Thing::new(count: u32)",
            "pub x::Thing::size: usize",
        ];
        assert_eq!(printed("u32"), expected);
    }

    #[test]
    fn a_changed_signature_is_another_line() {
        assert_ne!(printed("u32"), printed("u64"));
    }

    #[test]
    fn formats_that_are_not_known_are_named() {
        assert!(lines(&json!({"format_version": 1})).unwrap_err().contains("rustdoc writes format 1"));
    }
}
