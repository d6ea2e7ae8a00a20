//! The sockets of the event loops. Tests replace them by those of a simulated network.

#[cfg(test)]
mod simulated;

#[cfg(test)]
pub(crate) use simulated::*;
#[cfg(not(test))]
pub(crate) use system::*;

#[cfg(not(test))]
mod system {
    pub(crate) use tokio::net::TcpStream;

    /// The listener of a service.
    pub(crate) type TcpListener = tokio::net::TcpListener;

    /// Returns a listener of the system.
    pub(crate) fn listening(listener: tokio::net::TcpListener) -> TcpListener {
        listener
    }

    /// Returns a connection of the system.
    #[cfg(feature = "grpc")]
    pub(crate) fn connected(stream: TcpStream) -> TcpStream {
        stream
    }
}
