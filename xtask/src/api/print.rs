//! Types, bounds and signatures as Rust writes them, from rustdoc's JSON. What it does not know it prints as `?`.

use serde_json::Value;

/// A type.
pub(super) fn ty(value: &Value) -> String {
    let Some((kind, inner)) = only(value) else { return value.as_str().map_or("?".to_owned(), infer) };
    match kind {
        "resolved_path" => path(inner),
        "generic" | "primitive" => text(inner).to_owned(),
        "tuple" => tuple(list(inner).iter().map(ty).collect()),
        "slice" => format!("[{}]", ty(inner)),
        "array" => format!("[{}; {}]", ty(&inner["type"]), text(&inner["len"])),
        "impl_trait" => format!("impl {}", bounds(inner)),
        "dyn_trait" => {
            let traits = list(&inner["traits"]).iter().map(|it| format!("{}{}", binder(it), path(&it["trait"])));
            let all: Vec<String> = traits.chain(inner["lifetime"].as_str().map(str::to_owned)).collect();
            format!("dyn {}", all.join(" + "))
        }
        "raw_pointer" => format!("*{} {}", if flag(inner, "is_mutable") { "mut" } else { "const" }, ty(&inner["type"])),
        "borrowed_ref" => {
            let lifetime = inner["lifetime"].as_str().map_or(String::new(), |lifetime| format!("{lifetime} "));
            let mutable = if flag(inner, "is_mutable") { "mut " } else { "" };
            let referent = ty(&inner["type"]);
            let is_sum = referent.contains(" + ") && (referent.starts_with("dyn ") || referent.starts_with("impl "));
            let referent = if is_sum { format!("({referent})") } else { referent };
            format!("&{lifetime}{mutable}{referent}")
        }
        "function_pointer" => {
            format!("{}{}fn{}", binder(inner), qualifiers(&inner["header"]), signature(&inner["sig"], false))
        }
        "qualified_path" => {
            let (of, name) = (ty(&inner["self_type"]), text(&inner["name"]));
            match inner["trait"]["path"].as_str() {
                Some(through) if !through.is_empty() => {
                    format!("<{of} as {}>::{name}{}", path(&inner["trait"]), arguments(&inner["args"]))
                }
                _ => format!("{of}::{name}{}", arguments(&inner["args"])),
            }
        }
        _ => "?".to_owned(),
    }
}

/// The last name of a path, with its arguments.
pub(super) fn path(value: &Value) -> String {
    let name = text(&value["path"]);
    format!("{}{}", name.rsplit("::").next().unwrap_or(name), arguments(&value["args"]))
}

/// A function's inputs and output.
pub(super) fn signature(sig: &Value, has_names: bool) -> String {
    let input = |input: &Value| match (text(&input[0]), ty(&input[1])) {
        ("self", of) if of == "Self" => "self".to_owned(),
        ("self", of) => match of.strip_prefix('&').and_then(|of| of.strip_suffix("Self")) {
            Some(between) => format!("&{between}self"),
            None => format!("self: {of}"),
        },
        (name, of) if has_names => format!("{name}: {of}"),
        (_, of) => of,
    };
    let inputs: Vec<String> = list(&sig["inputs"]).iter().map(input).collect();
    let output = if sig["output"].is_null() { String::new() } else { format!(" -> {}", ty(&sig["output"])) };
    format!("({}){output}", inputs.join(", "))
}

/// The words before `fn`: const, async, unsafe and the ABI.
pub(super) fn qualifiers(header: &Value) -> String {
    let mut words = String::new();
    for (name, word) in [("is_const", "const "), ("is_async", "async "), ("is_unsafe", "unsafe ")] {
        words += if flag(header, name) { word } else { "" };
    }
    // Other ABIs than Rust's are objects such as {"C": {"unwind": false}}.
    match only(&header["abi"]) {
        Some((abi, _)) => format!("{words}extern \"{abi}\" "),
        None => words,
    }
}

/// Parameters in angle brackets, and the clauses after `where`.
pub(super) fn generics(value: &Value) -> (String, String) {
    let is_written = |param: &&Value| !flag(&param["kind"]["type"], "is_synthetic");
    let params: Vec<String> = list(&value["params"]).iter().filter(is_written).map(parameter).collect();
    let params = if params.is_empty() { String::new() } else { format!("<{}>", params.join(", ")) };
    let clauses: Vec<String> = list(&value["where_predicates"]).iter().map(clause).collect();
    let clauses = if clauses.is_empty() { String::new() } else { format!(" where {}", clauses.join(", ")) };
    (params, clauses)
}

/// Bounds, joined by plus signs.
pub(super) fn bounds(value: &Value) -> String {
    let bound = |bound: &Value| match only(bound) {
        Some(("trait_bound", inner)) => {
            let maybe = if inner["modifier"] == "maybe" { "?" } else { "" };
            format!("{}{maybe}{}", binder(inner), path(&inner["trait"]))
        }
        Some(("use", inner)) => {
            let names = list(inner).iter().map(|name| only(name).map_or(text(name), |(_, name)| text(name)));
            format!("use<{}>", names.collect::<Vec<_>>().join(", "))
        }
        Some((_, lifetime)) => text(lifetime).to_owned(),
        None => "?".to_owned(),
    };
    list(value).iter().map(bound).collect::<Vec<_>>().join(" + ")
}

fn parameter(param: &Value) -> String {
    let name = text(&param["name"]);
    let with = |mark: &str, what: String| if what.is_empty() { what } else { format!("{mark}{what}") };
    match only(&param["kind"]) {
        Some(("lifetime", inner)) => {
            let outlived: Vec<&str> = list(&inner["outlives"]).iter().map(text).collect();
            format!("{name}{}", with(": ", outlived.join(" + ")))
        }
        Some(("type", inner)) => {
            let default = if inner["default"].is_null() { String::new() } else { ty(&inner["default"]) };
            format!("{name}{}{}", with(": ", bounds(&inner["bounds"])), with(" = ", default))
        }
        Some(("const", inner)) => {
            let default = inner["default"].as_str().unwrap_or_default().to_owned();
            format!("const {name}: {}{}", ty(&inner["type"]), with(" = ", default))
        }
        _ => name.to_owned(),
    }
}

fn clause(predicate: &Value) -> String {
    match only(predicate) {
        Some(("bound_predicate", inner)) => {
            format!("{}{}: {}", binder(inner), ty(&inner["type"]), bounds(&inner["bounds"]))
        }
        Some(("lifetime_predicate", inner)) => {
            let outlived: Vec<&str> = list(&inner["outlives"]).iter().map(text).collect();
            format!("{}: {}", text(&inner["lifetime"]), outlived.join(" + "))
        }
        Some(("eq_predicate", inner)) => format!("{} = {}", ty(&inner["lhs"]), term(&inner["rhs"])),
        _ => "?".to_owned(),
    }
}

/// `for<'a> `, where a bound has lifetimes of its own.
fn binder(value: &Value) -> String {
    let params: Vec<String> = list(&value["generic_params"]).iter().map(parameter).collect();
    if params.is_empty() { String::new() } else { format!("for<{}> ", params.join(", ")) }
}

/// The arguments of a path, with their brackets.
fn arguments(args: &Value) -> String {
    match only(args) {
        Some(("angle_bracketed", inner)) => {
            let constraint = |it: &Value| {
                let name = format!("{}{}", text(&it["name"]), arguments(&it["args"]));
                match only(&it["binding"]) {
                    Some(("equality", of)) => format!("{name} = {}", term(of)),
                    Some((_, inner)) => format!("{name}: {}", bounds(inner)),
                    None => name,
                }
            };
            let all = list(&inner["args"]).iter().map(term).chain(list(&inner["constraints"]).iter().map(constraint));
            let all: Vec<String> = all.collect();
            if all.is_empty() { String::new() } else { format!("<{}>", all.join(", ")) }
        }
        Some(("parenthesized", inner)) => {
            let inputs: Vec<String> = list(&inner["inputs"]).iter().map(ty).collect();
            let output =
                if inner["output"].is_null() { String::new() } else { format!(" -> {}", ty(&inner["output"])) };
            format!("({}){output}", inputs.join(", "))
        }
        _ => String::new(),
    }
}

/// A type, a lifetime or a constant.
fn term(value: &Value) -> String {
    match only(value) {
        Some(("type", inner)) => ty(inner),
        Some(("lifetime", inner)) => text(inner).to_owned(),
        Some(("const", inner)) => text(&inner["expr"]).to_owned(),
        _ => value.as_str().map_or("?".to_owned(), infer),
    }
}

/// A kind that has nothing inside.
fn infer(kind: &str) -> String {
    if kind == "infer" { "_".to_owned() } else { "?".to_owned() }
}

fn tuple(parts: Vec<String>) -> String {
    match &parts[..] {
        [one] => format!("({one},)"),
        _ => format!("({})", parts.join(", ")),
    }
}

/// The key and the value of an object that has one of each.
pub(super) fn only(value: &Value) -> Option<(&str, &Value)> {
    value.as_object()?.iter().next().map(|(key, value)| (key.as_str(), value))
}

pub(super) fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

pub(super) fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

pub(super) fn flag(value: &Value, name: &str) -> bool {
    value[name].as_bool().unwrap_or(false)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn types_are_printed_as_they_are_written() {
        let slice =
            json!({"borrowed_ref": {"lifetime": "'a", "is_mutable": true, "type": {"slice": {"primitive": "u8"}}}});
        assert_eq!(ty(&slice), "&'a mut [u8]");
        let args = json!({"angle_bracketed": {"args": [{"lifetime": "'a"}, {"type": {"generic": "T"}}], "constraints": [
            {"name": "Item", "args": null, "binding": {"equality": {"type": {"primitive": "u8"}}}}
        ]}});
        let path = json!({"path": "std::iter::Thing", "id": 1, "args": args});
        assert_eq!(ty(&json!({"resolved_path": path})), "Thing<'a, T, Item = u8>");
        let function = json!({"path": "Fn", "id": 2, "args": {"parenthesized": {
            "inputs": [{"primitive": "u8"}], "output": {"tuple": []}
        }}});
        let bound =
            json!([{"trait_bound": {"trait": function, "generic_params": [], "modifier": "none"}}, {"outlives": "'a"}]);
        assert_eq!(ty(&json!({"impl_trait": bound})), "impl Fn(u8) -> () + 'a");
        assert_eq!(ty(&json!({"tuple": [{"array": {"type": {"primitive": "f32"}, "len": "4"}}]})), "([f32; 4],)");
        assert_eq!(ty(&json!({"raw_pointer": {"is_mutable": false, "type": {"primitive": "i8"}}})), "*const i8");
        assert_eq!(ty(&json!({"something_new": {}})), "?");
    }

    #[test]
    fn signatures_say_how_self_is_taken() {
        let inputs =
            |of: Value| json!({"inputs": [["self", of], ["n", {"primitive": "u32"}]], "output": {"generic": "T"}});
        let of = json!({"generic": "Self"});
        let borrowed =
            |mutable: bool| json!({"borrowed_ref": {"lifetime": null, "is_mutable": mutable, "type": of.clone()}});
        assert_eq!(signature(&inputs(borrowed(false)), true), "(&self, n: u32) -> T");
        assert_eq!(signature(&inputs(borrowed(true)), true), "(&mut self, n: u32) -> T");
        assert_eq!(signature(&inputs(json!({"generic": "Self"})), true), "(self, n: u32) -> T");
    }
}
