//! The HTTP client by which stores are asked.

use std::fmt;

use futures_util::future::BoxFuture;
use object_store::ClientOptions;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpService, ReqwestConnector,
};

/// Connects like `object_store` does. An answer 501 is an error of the connection, which is not repeated: as an answer
/// it is repeated like all others from 500 on, for minutes.
#[derive(Debug)]
pub(crate) struct Connector;

impl HttpConnector for Connector {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        Ok(HttpClient::new(Client(ReqwestConnector::default().connect(options)?)))
    }
}

#[derive(Debug)]
struct Client(HttpClient);

impl HttpService for Client {
    fn call<'a, 'b>(&'a self, request: HttpRequest) -> BoxFuture<'b, Result<HttpResponse, HttpError>>
    where
        'a: 'b,
        Self: 'b,
    {
        Box::pin(async move {
            let answer = self.0.execute(request).await?;
            match answer.status().as_u16() {
                501 => Err(HttpError::new(HttpErrorKind::Unknown, NotImplemented)),
                _ => Ok(answer),
            }
        })
    }
}

/// The store has answered 501.
#[derive(Debug)]
pub(crate) struct NotImplemented;

impl fmt::Display for NotImplemented {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("status 501")
    }
}

impl std::error::Error for NotImplemented {}
