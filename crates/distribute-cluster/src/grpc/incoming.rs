//! Accepted connections as tonic's servers take them.

use std::io::Result as IoResult;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio_stream::Stream;
use tonic::transport::server::Connected;

use crate::{Acquaintance, Connection, Incoming};

impl Connected for Connection {
    type ConnectInfo = Acquaintance;

    fn connect_info(&self) -> Acquaintance {
        self.acquaintance()
    }
}

impl Stream for Incoming {
    type Item = IoResult<Connection>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.poll_accept(cx).map(|connection| Some(Ok(connection)))
    }
}
