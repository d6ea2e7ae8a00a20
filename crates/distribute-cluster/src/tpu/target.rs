//! Which TPU a program uses.

use serde::Deserialize;

use crate::{Error, Result, environment};

/// The TPU whose hosts form the cluster.
///
/// # Examples
/// ```
/// use distribute_cluster::tpu::TpuTarget;
/// assert_eq!(TpuTarget::from("local"), TpuTarget::Local);
/// assert_eq!(TpuTarget::from("pod"), TpuTarget::Name("pod".to_owned()));
/// assert_eq!(TpuTarget::from(""), TpuTarget::Environment);
/// assert!(TpuTarget::from_list(&["one", "two"]).is_err());
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum TpuTarget {
    /// The first that is there: KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS, TPU_NAME, TPU_CONFIG, and the hosts of this machine's
    /// slice by TPU_PROCESS_ADDRESSES, by TPU_WORKER_HOSTNAMES, or by the metadata server.
    #[default]
    Environment,
    /// This machine's TPU: a program of one process.
    Local,
    /// A TPU by its name in Cloud TPU.
    Name(String),
    /// A list of worker servers, such as `grpc://10.0.0.1,grpc://10.0.0.2:8470`.
    Endpoints(String),
}

impl TpuTarget {
    /// Returns the target of a list, which must have one element.
    ///
    /// # Errors
    /// [`Error::Config`] if the list is empty or has several elements.
    pub fn from_list<T: AsRef<str>>(list: &[T]) -> Result<TpuTarget> {
        match list {
            [only] => Ok(TpuTarget::from(only.as_ref())),
            _ => {
                let given = list.iter().map(AsRef::as_ref).collect::<Vec<_>>().join(", ");
                let problem = match list {
                    [] => "no TPU is named",
                    _ => "several TPUs are named, and one program uses one",
                };
                let remedy = "Name one; several hosts of it are one text with commas.";
                Err(Error::config(SUBJECT, problem, given, "a list of one TPU", remedy))
            }
        }
    }

    /// Returns the target that variables name, if they do.
    pub(super) fn from_vars(variable: &dyn Fn(&str) -> Option<String>) -> Result<Option<Named>> {
        #[derive(Deserialize)]
        struct Config {
            tpu_node_name: String,
            project: Option<String>,
            zone: Option<String>,
        }
        let set = environment::set(variable);
        let named = |target: TpuTarget| Named { target, project: None, zone: None };
        if let Some(endpoints) = set(KUBE) {
            let target = TpuTarget::from(endpoints.as_str());
            return match target {
                TpuTarget::Endpoints(_) => Ok(Some(named(target))),
                _ => Err(Error::config(KUBE, "it is not a list of endpoints", endpoints, ENDPOINTS, "Correct it.")),
            };
        }
        if let Some(name) = set("TPU_NAME") {
            return Ok(Some(named(TpuTarget::from(name.as_str()))));
        }
        let Some(config) = set(CONFIG) else { return Ok(None) };
        let malformed = |error: serde_json::Error| {
            let expected = r#"{"tpu_node_name": "name", "project": "project", "zone": "zone"}"#;
            Error::config(CONFIG, format!("it does not name a TPU: {error}"), config.as_str(), expected, "Correct it.")
        };
        let value = crate::json::parse(&config).map_err(malformed)?;
        let Config { tpu_node_name, project, zone } = serde_json::from_value(value).map_err(malformed)?;
        Ok(Some(Named { target: TpuTarget::from(tpu_node_name), project, zone }))
    }
}

impl From<&str> for TpuTarget {
    /// Returns the environment's for an empty text, this machine's for `local`, endpoints for a text that begins with
    /// `grpc://`, else a name.
    fn from(text: &str) -> TpuTarget {
        match text.trim() {
            "" => TpuTarget::Environment,
            "local" => TpuTarget::Local,
            text if text.starts_with(GRPC) => TpuTarget::Endpoints(text.to_owned()),
            name => TpuTarget::Name(name.to_owned()),
        }
    }
}

impl From<String> for TpuTarget {
    fn from(text: String) -> TpuTarget {
        TpuTarget::from(text.as_str())
    }
}

/// A target with the place that TPU_CONFIG gives it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Named {
    pub(super) target: TpuTarget,
    pub(super) project: Option<String>,
    pub(super) zone: Option<String>,
}

/// Returns the addresses of a list of endpoints, with a port for those without one.
pub(super) fn addresses(endpoints: &str, port: u16) -> Result<Vec<String>> {
    let wrong = |endpoint: &str| {
        let problem = format!("an endpoint does not begin with {GRPC}");
        Error::config(SUBJECT, problem, format!("{endpoint:?}"), ENDPOINTS, "Write all endpoints in that form.")
    };
    let address = |endpoint: &str| {
        let address = endpoint.strip_prefix(GRPC).ok_or_else(|| wrong(endpoint))?.trim_end_matches('/');
        // The colons of an IPv6 address are within brackets.
        let has_port = address.rsplit(']').next().is_some_and(|rest| rest.contains(':'));
        Ok(if has_port { address.to_owned() } else { format!("{address}:{port}") })
    };
    endpoints.split(',').map(str::trim).map(address).collect()
}

const SUBJECT: &str = "TPU";
const KUBE: &str = "KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS";
const CONFIG: &str = "TPU_CONFIG";
const GRPC: &str = "grpc://";
const ENDPOINTS: &str = "grpc://host:port,…";

#[cfg(test)]
mod tests {
    use super::*;

    fn from(vars: &[(&str, &str)]) -> Result<Option<Named>> {
        let find = |name: &str| vars.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned());
        TpuTarget::from_vars(&find)
    }

    #[test]
    fn variables_have_their_order() {
        let kube = ("KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS", "grpc://10.0.0.1");
        let config = ("TPU_CONFIG", r#"{"tpu_node_name": "c", "project": "p", "zone": "z"}"#);
        let target = |vars: &[(&str, &str)]| from(vars).unwrap().unwrap().target;
        assert_eq!(target(&[config, ("TPU_NAME", "n"), kube]), TpuTarget::Endpoints("grpc://10.0.0.1".to_owned()));
        assert_eq!(target(&[config, ("TPU_NAME", "n")]), TpuTarget::Name("n".to_owned()));
        assert_eq!(target(&[("TPU_NAME", "local")]), TpuTarget::Local);
        let named = from(&[config, ("TPU_NAME", "")]).unwrap().unwrap();
        assert_eq!((named.project.as_deref(), named.zone.as_deref()), (Some("p"), Some("z")));
        assert_eq!(named.target, TpuTarget::Name("c".to_owned()));
        assert_eq!(from(&[("COLAB_TPU_ADDR", "10.0.0.1:8470")]).unwrap(), None);
        for (vars, words) in [
            (("TPU_CONFIG", "{"), "TPU_CONFIG: it does not name a TPU: EOF"),
            (("TPU_CONFIG", "{}"), "missing field `tpu_node_name`"),
            (("TPU_CONFIG", r#"{"tpu_node_name": "a", "tpu_node_name": "b"}"#), "stands twice"),
            ((KUBE, "10.0.0.1:8470"), "it is not a list of endpoints. Given: 10.0.0.1:8470"),
        ] {
            let text = from(&[vars]).unwrap_err().to_string();
            assert!(text.contains(words), "{text}");
        }
    }

    #[test]
    fn lists_have_one_element() {
        assert_eq!(TpuTarget::from_list(&["local"]).unwrap(), TpuTarget::Local);
        for (list, words) in [(&[][..], "no TPU is named"), (&["a", "b"][..], "several TPUs are named")] {
            let text = TpuTarget::from_list(list).unwrap_err().to_string();
            assert!(text.contains(words), "{text}");
        }
    }

    #[test]
    fn endpoints_have_a_port() {
        let of = |endpoints: &str| addresses(endpoints, 8470);
        assert_eq!(of("grpc://10.1.2.3").unwrap(), ["10.1.2.3:8470"]);
        assert_eq!(
            of("grpc://a:1, grpc://b/,grpc://[fd00::1],grpc://[fd00::1]:2").unwrap(),
            ["a:1", "b:8470", "[fd00::1]:8470", "[fd00::1]:2"]
        );
        let text = of("grpc://a,http://b").unwrap_err().to_string();
        assert!(text.contains("\"http://b\""), "{text}");
        assert!(of("grpc://a,").is_err());
    }
}
