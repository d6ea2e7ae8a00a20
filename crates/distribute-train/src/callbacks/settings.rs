//! Settings of collective callbacks, as workers compare them.

/// Returns a callback's name with the settings that differ from the defaults.
pub(super) fn of(callback: &str, settings: impl IntoIterator<Item = String>) -> String {
    let settings: Vec<String> = settings.into_iter().collect();
    if settings.is_empty() { callback.to_owned() } else { format!("{callback}({})", settings.join(", ")) }
}
