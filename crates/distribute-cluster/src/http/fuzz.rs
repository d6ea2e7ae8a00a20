//! Answers of services that are errors.

use std::time::{Duration, SystemTime};

use reqwest::StatusCode;
use reqwest::header::{HeaderMap, HeaderValue, RETRY_AFTER};

use super::refusal::{MAX_MESSAGE, delay};
use super::{Refusal, Remedies};
use crate::fuzz::Input;

/// The status by the first two bytes, the header `Retry-After` as a piece, and then the body.
pub(crate) fn refusals(bytes: &[u8]) -> bool {
    let mut input = Input(bytes);
    let status = u16::from(input.byte()) | u16::from(input.byte()) << 8;
    let status = StatusCode::from_u16(400 + status % 200).expect("it has three digits");
    let asked = input.piece().unwrap_or_default();
    let now = SystemTime::UNIX_EPOCH + Duration::from_secs(784_111_770);
    let mut headers = HeaderMap::new();
    let asked = HeaderValue::from_bytes(asked).inspect(|value| drop(headers.insert(RETRY_AFTER, value.clone())));
    let after = asked.ok().and_then(|value| delay(value.to_str().ok()?, now));
    let none = String::new;
    let remedies = Remedies { unauthorized: none(), forbidden: none(), not_found: none() };
    let refusal = Refusal::of_status(status, &headers, input.0, &remedies, now);
    assert_eq!(refusal.after, after);
    let text = refusal.into_error("fuzz", "a request").to_string();
    assert!(!text.contains('\n') && text.chars().count() < 10 * MAX_MESSAGE + 500, "{text}");
    after.is_some() || input.0.len() > 2
}
