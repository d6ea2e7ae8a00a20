//! The answers of the status server.

use axum::Json;
use axum::extract::State;
use axum::http::header::{CONTENT_SECURITY_POLICY, HeaderName, REFERRER_POLICY, X_CONTENT_TYPE_OPTIONS};
use axum::response::{Html, IntoResponse};
use axum::routing::get;

use super::server::{OPEN_METRICS, Routes, answer};
use super::{Board, metrics};

/// Returns the routes to a board.
pub(crate) fn routes(board: &Board) -> Routes {
    Routes::new()
        .route("/", get(|| async { (PROTECTION, Html(PAGE)) }))
        .route("/status.json", get(json))
        .route("/metrics", get(open_metrics))
        .with_state(board.clone())
}

async fn json(State(board): State<Board>) -> impl IntoResponse {
    (PROTECTION, Json(board.view()))
}

async fn open_metrics(State(board): State<Board>) -> impl IntoResponse {
    answer(metrics::text(&board.view()), OPEN_METRICS)
}

/// The page. It has no other parts, and shows the JSON as text, never as HTML.
const PAGE: &str = include_str!("page.html");

/// The page's own script may fetch from this server; a browser refuses everything else, even if a value of a task
/// should be taken for HTML.
const PROTECTION: [(HeaderName, &str); 3] = [
    (
        CONTENT_SECURITY_POLICY,
        "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; connect-src 'self'; \
         base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    (X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (REFERRER_POLICY, "no-referrer"),
];
