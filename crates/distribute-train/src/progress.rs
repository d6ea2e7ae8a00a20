//! Progress of a training run, in the form that suits the destination.
//!
//! | destination | form |
//! |---|---|
//! | terminal | a bar, one line per epoch, redrawn in place ([`BarRenderer`]) |
//! | file or pipe | `key=value` lines ([`PlainRenderer`]) or JSON lines ([`JsonRenderer`]) |
//! | launcher | one [`Message`] per line over TCP; the launcher draws one bar for all tasks |
//!
//! While a status page is shown, every task also reports its [`Vitals`] about once a second, from a thread of its own.
//!
//! A loop calls [`Progress`]; a launcher receives [`Message`]s and feeds them to a [`Renderer`]. Bars and lines go to
//! standard error, the closing [`Summary`] to standard output. A running training never waits or fails because of
//! progress: events pass through a queue that keeps only the newest step, and a destination that fails is given up.

mod bar;
mod calls;
mod clock;
mod form;
mod launcher;
mod lines;
mod log;
mod protocol;
mod pulse;
mod render;
mod report;
mod reporter;
mod sink;
mod summary;
mod text;
mod vitals;

pub use bar::{BarRenderer, colors_allowed, terminal_width};
pub use calls::{CallNow, CallSource, GroupCall};
pub use clock::{Clock, SystemClock};
pub use distribute_types::Waits;
pub use form::Form;
pub use lines::{JsonRenderer, PlainRenderer};
pub use log::LogWriter;
pub use protocol::{Event, Message, Status};
#[cfg(all(feature = "checkpoint", feature = "status"))]
pub(crate) use pulse::{Link, Pulse};
pub use render::Renderer;
pub use report::{Options, Progress};
#[cfg(feature = "kubeflow")]
pub(crate) use sink::Sink;
pub use summary::Summary;
#[cfg(feature = "kubeflow")]
pub(crate) use text::one_line;
pub use vitals::{Activity, Spread, Vitals, WaitSource, peak_memory_bytes};
