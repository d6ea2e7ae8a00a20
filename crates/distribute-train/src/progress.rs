//! Progress of a training run, in the form that suits the destination.
//!
//! | destination | form |
//! |---|---|
//! | terminal | a bar, one line per epoch, redrawn in place ([`BarRenderer`]) |
//! | file or pipe | `key=value` lines ([`PlainRenderer`]) or JSON lines ([`JsonRenderer`]) |
//! | launcher | one [`Message`] per line over TCP; the launcher draws one bar for all tasks |
//!
//! A loop calls [`Progress`]; a launcher receives [`Message`]s and feeds them to a [`Renderer`]. Bars and lines go to
//! standard error, the closing [`Summary`] to standard output. A running training never waits or fails because of
//! progress: events pass through a queue that keeps only the newest step, and a destination that fails is given up.

mod bar;
mod clock;
mod form;
mod launcher;
mod lines;
mod log;
mod protocol;
mod render;
mod report;
mod reporter;
mod summary;
mod text;

pub use bar::{BarRenderer, colors_allowed, terminal_width};
pub use clock::{Clock, SystemClock};
pub use form::Form;
pub use lines::{JsonRenderer, PlainRenderer};
pub use log::LogWriter;
pub use protocol::{Event, Message, Status};
pub use render::Renderer;
pub use report::{Options, Progress};
pub use summary::Summary;
