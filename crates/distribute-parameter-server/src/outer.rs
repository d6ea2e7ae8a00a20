//! Decoupled DiLoCo: islands that train apart, and servers that hold the outer parameters (adr/0044).
//!
//! - `fragment`: when changes of islands make an outer step, a core without sockets and clocks; `held` and `store` are
//!   what a server holds, `methods` and `server` its service, `checkpoint` what it saves.
//! - `island`: an island's calls; `exchange`: what it does with the answers; `decoupled` and `builder`: its strategy.

mod builder;
mod checkpoint;
mod decoupled;
mod event;
mod exchange;
mod fragment;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
mod held;
mod island;
mod methods;
mod server;
mod store;

pub use builder::DecoupledDilocoBuilder;
pub use decoupled::DecoupledDilocoStrategy;
pub use event::{OuterExchange, OuterOutcome};
pub use server::{OuterServer, OuterServerOptions};
