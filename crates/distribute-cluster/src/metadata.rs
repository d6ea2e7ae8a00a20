//! The metadata server of Google Cloud's machines.

use reqwest::Url;
use serde::Deserialize;

use crate::http::{AccessToken, Ask, Client, Remedies};
use crate::{Error, Result, environment};

/// Where the metadata server is.
///
/// # Source
/// "About VM metadata" of Compute Engine; the variables are those of Google's client libraries.
#[derive(Clone, Debug)]
pub(crate) struct Metadata {
    base: Url,
    /// Whether a variable names it.
    pub(crate) is_given: bool,
}

impl Metadata {
    /// Reads GCE_METADATA_HOST, else GCE_METADATA_IP; each may have a port.
    ///
    /// # Errors
    /// [`Error::Config`] if the value is not a host.
    pub(crate) fn from_vars(variable: &dyn Fn(&str) -> Option<String>) -> Result<Metadata> {
        let set = environment::set(variable);
        let given = ["GCE_METADATA_HOST", "GCE_METADATA_IP"].into_iter().find_map(|name| Some((name, set(name)?)));
        let (name, host) = match &given {
            Some((name, host)) => (*name, host.trim()),
            None => ("metadata server", HOST),
        };
        let url = format!("http://{host}{ROOT}");
        let base = Url::parse(&url).ok().filter(|base| {
            base.path() == ROOT && base.query().is_none() && base.fragment().is_none() && base.username().is_empty()
        });
        let base = base.ok_or_else(|| {
            let expected = "a host or host:port, such as metadata.google.internal";
            Error::config(name, "it is not a host", host, expected, "Correct it, or unset it.")
        })?;
        Ok(Metadata { base, is_given: given.is_some() })
    }

    /// Returns a value, without white space around it; `None` if there is none.
    pub(crate) async fn find(&self, client: &Client, path: &str) -> Result<Option<String>> {
        let ask = self.ask(path)?;
        match client.bytes(&ask).await {
            Ok(body) => Ok(Some(String::from_utf8_lossy(&body).trim().to_owned())),
            Err(refusal) if refusal.status == Some(reqwest::StatusCode::NOT_FOUND) => Ok(None),
            Err(refusal) => Err(client.error(&ask, refusal)),
        }
    }

    /// Returns a value, without white space around it.
    pub(crate) async fn value(&self, client: &Client, path: &str) -> Result<String> {
        let ask = self.ask(path)?;
        let body = client.bytes(&ask).await.map_err(|refusal| client.error(&ask, refusal))?;
        Ok(String::from_utf8_lossy(&body).trim().to_owned())
    }

    /// Returns the internal address of this machine.
    pub(crate) async fn own_address(&self, client: &Client) -> Result<String> {
        self.value(client, "instance/network-interfaces/0/ip").await
    }

    /// Returns the project, if none is given.
    pub(crate) async fn project(&self, client: &Client, given: Option<&str>) -> Result<String> {
        match given {
            Some(given) => Ok(given.to_owned()),
            None => self.value(client, "project/project-id").await,
        }
    }

    /// Returns the zone, if none is given.
    pub(crate) async fn zone(&self, client: &Client, given: Option<&str>) -> Result<String> {
        match given {
            Some(given) => Ok(given.to_owned()),
            // `projects/123/zones/us-central1-a`
            None => {
                let zone = self.value(client, "instance/zone").await?;
                Ok(zone.rsplit('/').next().unwrap_or_default().to_owned())
            }
        }
    }

    /// Returns the token of the machine's service account, if none is given.
    pub(crate) async fn token(&self, client: &Client, given: Option<&AccessToken>) -> Result<AccessToken> {
        #[derive(Deserialize)]
        struct Answer {
            access_token: String,
        }
        if let Some(given) = given {
            return Ok(given.clone());
        }
        let ask = self.ask("instance/service-accounts/default/token")?;
        let answer: Answer = client.json(&ask).await.map_err(|mut refusal| {
            refusal.remedy = format!("{}; elsewhere, pass an access token", refusal.remedy);
            client.error(&ask, refusal)
        })?;
        Ok(AccessToken::new(answer.access_token))
    }

    fn ask(&self, path: &str) -> Result<Ask> {
        let absent = "Run on a machine of Google Cloud, or give the value in the options";
        let url = self.base.join(path).map_err(|_| {
            Error::config("metadata server", "it has no such path", path, "instance/zone", "Correct the path.")
        })?;
        Ok(Ask {
            what: format!("the metadata server's {path}"),
            url,
            body: None,
            token: None,
            is_metadata: true,
            limit_bytes: MAX_BYTES,
            remedies: Remedies {
                unauthorized: absent.to_owned(),
                forbidden: absent.to_owned(),
                not_found: absent.to_owned(),
            },
        })
    }
}

/// Returns a name as a segment of a path.
///
/// # Errors
/// [`Error::Config`] if it is not a name of a resource of Google Cloud.
pub(crate) fn segment<'a>(subject: &'static str, what: &str, name: &'a str) -> Result<&'a str> {
    // Projects of organisations are named `example.com:name`.
    let is_right = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.:".contains(&byte);
    if !name.is_empty() && name.len() <= MAX_NAME && name.bytes().all(is_right) && !name.bytes().all(|b| b == b'.') {
        return Ok(name);
    }
    let expected = format!("1 to {MAX_NAME} letters, digits, `-`, `_`, `.` or `:`");
    Err(Error::config(subject, format!("{what} is not a name"), format!("{name:?}"), expected, "Correct the name."))
}

const HOST: &str = "metadata.google.internal";
const ROOT: &str = "/computeMetadata/v1/";
/// Size limit of an answer: values of custom metadata have at most 256 KiB.
const MAX_BYTES: usize = 512 << 10;
/// The longest name, in bytes.
const MAX_NAME: usize = 128;

#[cfg(test)]
mod tests {
    use super::*;

    fn from(vars: &[(&str, &str)]) -> Result<Metadata> {
        let find = |name: &str| vars.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned());
        Metadata::from_vars(&find)
    }

    #[test]
    fn the_host_counts_before_the_address() {
        let base = |vars: &[(&str, &str)]| from(vars).unwrap().base.to_string();
        assert_eq!(base(&[]), "http://metadata.google.internal/computeMetadata/v1/");
        let both = [("GCE_METADATA_IP", "10.0.0.9:80"), ("GCE_METADATA_HOST", "10.0.0.8:81")];
        assert_eq!(base(&both), "http://10.0.0.8:81/computeMetadata/v1/");
        assert_eq!(base(&both[..1]), "http://10.0.0.9/computeMetadata/v1/");
        assert_eq!(base(&[("GCE_METADATA_HOST", ""), both[0]]), "http://10.0.0.9/computeMetadata/v1/");
        for wrong in ["a/b", "a b", "user@host", "a?b", "a:port", "http://a"] {
            let text = from(&[("GCE_METADATA_HOST", wrong)]).unwrap_err().to_string();
            assert!(text.starts_with("GCE_METADATA_HOST: it is not a host."), "{text}");
        }
    }

    #[test]
    fn names_are_segments_of_paths() {
        for right in ["my-project", "example.com:p", "us-central1-a", "a_b"] {
            assert_eq!(segment("x", "the name", right).unwrap(), right);
        }
        for wrong in ["", ".", "..", "a/b", "a b", "a?b", "é", &"a".repeat(129)] {
            assert!(segment("x", "the name", wrong).is_err(), "{wrong}");
        }
    }
}
