//! Profiles of TensorBoard's profile plugin.
//!
//! # Source
//! `tsl/profiler/protobuf/xplane.proto`. The plugin shows the lines of the plane of this name as threads of a host.

use std::collections::BTreeMap;

use prost::Message;

/// A row of a profile: spans of one thread, which do not overlap in part.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Row {
    pub(crate) name: String,
    pub(crate) spans: Vec<Span>,
}

/// A named interval, in seconds since the profile's begin.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Span {
    pub(crate) name: String,
    pub(crate) begin_s: f64,
    pub(crate) end_s: f64,
    /// Names and values that are shown with it.
    pub(crate) details: Vec<(&'static str, Detail)>,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Detail {
    Number(u64),
    Text(String),
}

/// Splits spans into rows in which none overlap, the first row as full as possible.
pub(crate) fn without_overlap(name: &str, mut spans: Vec<Span>) -> Vec<Row> {
    spans.sort_by(|a, b| a.begin_s.total_cmp(&b.begin_s));
    let mut rows: Vec<Row> = Vec::new();
    for span in spans {
        let free = rows.iter().position(|row| row.spans.last().is_none_or(|last| last.end_s <= span.begin_s));
        match free {
            Some(row) => rows[row].spans.push(span),
            None => {
                let name = if rows.is_empty() { name.to_owned() } else { format!("{name} ({})", rows.len() + 1) };
                rows.push(Row { name, spans: vec![span] });
            }
        }
    }
    rows
}

/// Encodes a profile that begins at `began_ns` since 1970.
pub(crate) fn encode(host: &str, began_ns: i64, rows: &[Row]) -> Vec<u8> {
    let mut plane = Plane { id: 1, name: HOST.to_owned(), ..Plane::default() };
    let (mut events, mut stats) = (Names::default(), Names::default());
    for (row, id) in rows.iter().zip(1..) {
        let event = |span: &Span| Event {
            metadata_id: events.id(&span.name),
            offset_ps: picoseconds(span.begin_s),
            duration_ps: picoseconds(span.end_s - span.begin_s),
            stats: span.details.iter().map(|(name, detail)| stat(stats.id(name), detail)).collect(),
        };
        let events = row.spans.iter().map(event).collect();
        plane.lines.push(Line { id, display_id: id, name: row.name.clone(), timestamp_ns: began_ns, events });
    }
    let named = |(name, id): (String, i64)| (id, Metadata { id, name });
    plane.event_metadata = events.0.into_iter().map(named).collect();
    plane.stat_metadata = stats.0.into_iter().map(named).collect();
    Space { planes: vec![plane], hostnames: vec![host.to_owned()] }.encode_to_vec()
}

fn stat(metadata_id: i64, detail: &Detail) -> Stat {
    let value = match detail {
        Detail::Number(number) => Value::Number(*number),
        Detail::Text(text) => Value::Text(text.clone()),
    };
    Stat { metadata_id, value: Some(value) }
}

/// Decodes the rows of a profile.
#[cfg(test)]
pub(crate) fn decode(bytes: &[u8]) -> Vec<Row> {
    let space = Space::decode(bytes).unwrap();
    let plane = &space.planes[0];
    let detail = |stat: &Stat| {
        let name =
            ["bytes", "call", "error"].into_iter().find(|name| *name == plane.stat_metadata[&stat.metadata_id].name);
        let detail = match stat.value.clone().unwrap() {
            Value::Number(number) => Detail::Number(number),
            Value::Text(text) => Detail::Text(text),
        };
        (name.unwrap(), detail)
    };
    let span = |event: &Event| Span {
        name: plane.event_metadata[&event.metadata_id].name.clone(),
        begin_s: event.offset_ps as f64 / 1e12,
        end_s: (event.offset_ps + event.duration_ps) as f64 / 1e12,
        details: event.stats.iter().map(detail).collect(),
    };
    let row = |line: &Line| Row { name: line.name.clone(), spans: line.events.iter().map(span).collect() };
    plane.lines.iter().map(row).collect()
}

/// Converts a time, which is 0 at least.
fn picoseconds(seconds: f64) -> i64 {
    (seconds.max(0.0) * 1e12).round() as i64
}

/// The numbers of names, from 1.
#[derive(Default)]
struct Names(BTreeMap<String, i64>);

impl Names {
    fn id(&mut self, name: &str) -> i64 {
        let next = self.0.len() as i64 + 1;
        *self.0.entry(name.to_owned()).or_insert(next)
    }
}

/// The name of the plane whose lines are the threads of a host.
const HOST: &str = "/host:CPU";

#[derive(Clone, PartialEq, Message)]
struct Space {
    #[prost(message, repeated, tag = "1")]
    planes: Vec<Plane>,
    #[prost(string, repeated, tag = "4")]
    hostnames: Vec<String>,
}

#[derive(Clone, PartialEq, Message)]
struct Plane {
    #[prost(int64, tag = "1")]
    id: i64,
    #[prost(string, tag = "2")]
    name: String,
    #[prost(message, repeated, tag = "3")]
    lines: Vec<Line>,
    #[prost(btree_map = "int64, message", tag = "4")]
    event_metadata: BTreeMap<i64, Metadata>,
    #[prost(btree_map = "int64, message", tag = "5")]
    stat_metadata: BTreeMap<i64, Metadata>,
}

/// The name of events or of their details.
#[derive(Clone, PartialEq, Message)]
struct Metadata {
    #[prost(int64, tag = "1")]
    id: i64,
    #[prost(string, tag = "2")]
    name: String,
}

#[derive(Clone, PartialEq, Message)]
struct Line {
    #[prost(int64, tag = "1")]
    id: i64,
    #[prost(int64, tag = "10")]
    display_id: i64,
    #[prost(string, tag = "2")]
    name: String,
    #[prost(int64, tag = "3")]
    timestamp_ns: i64,
    #[prost(message, repeated, tag = "4")]
    events: Vec<Event>,
}

#[derive(Clone, PartialEq, Message)]
struct Event {
    #[prost(int64, tag = "1")]
    metadata_id: i64,
    #[prost(int64, tag = "2")]
    offset_ps: i64,
    #[prost(int64, tag = "3")]
    duration_ps: i64,
    #[prost(message, repeated, tag = "4")]
    stats: Vec<Stat>,
}

#[derive(Clone, PartialEq, Message)]
struct Stat {
    #[prost(int64, tag = "1")]
    metadata_id: i64,
    #[prost(oneof = "Value", tags = "3, 5")]
    value: Option<Value>,
}

#[derive(Clone, PartialEq, prost::Oneof)]
enum Value {
    #[prost(uint64, tag = "3")]
    Number(u64),
    #[prost(string, tag = "5")]
    Text(String),
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span(name: &str, begin_s: f64, end_s: f64) -> Span {
        Span { name: name.to_owned(), begin_s, end_s, details: vec![("bytes", Detail::Number(8))] }
    }

    #[test]
    fn spans_that_overlap_are_in_rows_of_their_own() {
        let spans = vec![span("c", 2.0, 3.0), span("a", 0.0, 2.0), span("b", 1.0, 4.0), span("d", 3.5, 5.0)];
        let rows = without_overlap("replica 0", spans);
        let names = |row: &Row| row.spans.iter().map(|span| span.name.clone()).collect::<String>();
        assert_eq!(rows.iter().map(names).collect::<Vec<_>>(), ["acd", "b"]);
        assert_eq!((rows[0].name.as_str(), rows[1].name.as_str()), ("replica 0", "replica 0 (2)"));
        assert!(without_overlap("replica 0", Vec::new()).is_empty());
    }

    #[test]
    fn what_is_written_can_be_read() {
        let rows =
            without_overlap("replica 0", vec![span("a", 0.0, 2e-6), span("b", 1e-3, 3e-3), span("a", 4e-3, 5e-3)]);
        let bytes = encode("worker_1", 7, &rows);
        assert_eq!(decode(&bytes), rows);
        let space = Space::decode(&bytes[..]).unwrap();
        assert_eq!((space.hostnames[0].as_str(), space.planes[0].lines[0].timestamp_ns), ("worker_1", 7));
        assert_eq!(space.planes[0].event_metadata.len(), 2);
    }
}
