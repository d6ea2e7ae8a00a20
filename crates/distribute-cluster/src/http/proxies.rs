//! Proxies that the environment names.

use reqwest::{ClientBuilder, NoProxy, Proxy};

use crate::{Error, Result, environment};

/// The proxies of HTTPS_PROXY, HTTP_PROXY and ALL_PROXY, or the same in lower case, with the exceptions of NO_PROXY.
/// The metadata server is never asked through them: it answers for the machine that asks.
#[derive(Clone, Debug, Default)]
pub(crate) struct Proxies(Vec<Proxy>);

impl Proxies {
    /// # Errors
    /// [`Error::Config`] if a proxy is not a URL.
    pub(crate) fn from_vars(variable: &dyn Fn(&str) -> Option<String>) -> Result<Proxies> {
        let set = environment::set(variable);
        let value = |name: &'static str, lower: &'static str| {
            set(lower).map(|value| (lower, value)).or_else(|| set(name).map(|value| (name, value)))
        };
        let except = value("NO_PROXY", "no_proxy").and_then(|(_, list)| NoProxy::from_string(&list));
        let proxy = |name, url: &str, proxy: reqwest::Result<Proxy>| {
            let remedy = "Write it as http://host:port, or unset it.";
            let wrong = |_| Error::config(name, "it is not the URL of a proxy", shown(url), "http://host:port", remedy);
            Ok(proxy.map_err(wrong)?.no_proxy(except.clone()))
        };
        let mut proxies = Vec::new();
        if let Some((name, url)) = value("HTTPS_PROXY", "https_proxy") {
            proxies.push(proxy(name, &url, Proxy::https(url.trim()))?);
        }
        // CGI programs get request headers as HTTP_* variables, so the upper-case name cannot be trusted in one.
        let is_cgi = set("REQUEST_METHOD").is_some();
        if let Some((name, url)) =
            value("HTTP_PROXY", "http_proxy").filter(|(name, _)| !is_cgi || *name == "http_proxy")
        {
            proxies.push(proxy(name, &url, Proxy::http(url.trim()))?);
        }
        if let Some((name, url)) = value("ALL_PROXY", "all_proxy") {
            proxies.push(proxy(name, &url, Proxy::all(url.trim()))?);
        }
        Ok(Proxies(proxies))
    }

    /// Returns a builder of clients that use these proxies and no other.
    pub(crate) fn apply(&self, builder: ClientBuilder) -> ClientBuilder {
        self.0.iter().cloned().fold(builder.no_proxy(), ClientBuilder::proxy)
    }
}

/// Returns the URL of a proxy without the password in it.
fn shown(url: &str) -> &str {
    url.rsplit_once('@').map_or(url, |(_, host)| host)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn from(vars: &[(&str, &str)]) -> Result<Proxies> {
        let find = |name: &str| vars.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned());
        Proxies::from_vars(&find)
    }

    #[test]
    fn lower_case_counts_first_and_a_cgi_program_trusts_it_alone() {
        assert_eq!(from(&[]).unwrap().0.len(), 0);
        let both = from(&[("HTTPS_PROXY", "not a url"), ("https_proxy", "http://a:1"), ("ALL_PROXY", "http://b:1")]);
        assert_eq!(both.unwrap().0.len(), 2);
        assert_eq!(from(&[("HTTP_PROXY", "http://a:1"), ("REQUEST_METHOD", "GET")]).unwrap().0.len(), 0);
        assert_eq!(from(&[("http_proxy", "http://a:1"), ("REQUEST_METHOD", "GET")]).unwrap().0.len(), 1);
    }

    #[test]
    fn a_malformed_proxy_is_a_sentence_without_its_password() {
        let text = from(&[("HTTPS_PROXY", "http://user:secret@ho st:1")]).unwrap_err().to_string();
        assert!(text.starts_with("HTTPS_PROXY: it is not the URL of a proxy. Given: ho st:1"), "{text}");
    }
}
