//! Stores by their URLs, with the settings of the environment.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use object_store::aws::AmazonS3Builder;
use object_store::azure::{AzureConfigKey, MicrosoftAzureBuilder};
use object_store::client::ClientOptions;
use object_store::gcp::{GoogleCloudStorageBuilder, GoogleConfigKey};
use object_store::memory::InMemory;
use object_store::{BackoffConfig, ObjectStore, RetryConfig};
use parking_lot::Mutex;

use crate::client::Connector;
use crate::{Error, Result, environment};

/// A bucket, container or other store.
pub(crate) struct Store {
    /// The URL without a path, such as `s3://bucket`.
    pub(crate) url: String,
    pub(crate) objects: Arc<dyn ObjectStore>,
    /// How long a request that fails for the moment is repeated.
    pub(crate) retry: Duration,
    /// The most bytes of an object that the store copies itself.
    pub(crate) most_copied: u64,
}

impl Store {
    /// Returns the limit of one operation, with everything that is repeated.
    pub(crate) fn limit(&self) -> Duration {
        self.retry + REQUEST + Duration::from_secs(10)
    }

    /// Returns the store of a scheme and a bucket, opened at most once in a process.
    pub(crate) fn of(scheme: &str, bucket: &str) -> Result<Arc<Store>> {
        static OPEN: LazyLock<Mutex<HashMap<String, Arc<Store>>>> = LazyLock::new(Mutex::default);
        let url = format!("{scheme}://{bucket}");
        let mut open = OPEN.lock();
        if let Some(store) = open.get(&url) {
            return Ok(Arc::clone(store));
        }
        let store = Arc::new(Store::with(scheme, bucket, &environment::variables())?);
        open.insert(url, Arc::clone(&store));
        Ok(store)
    }

    /// Creates a store with settings given as environment variables.
    pub(crate) fn with(scheme: &str, bucket: &str, variables: &[(String, String)]) -> Result<Store> {
        // TLS needs a provider; one that the program has installed stays.
        drop(rustls::crypto::ring::default_provider().install_default());
        let url = format!("{scheme}://{bucket}");
        let retry = environment::retry_limit(variables)?;
        let objects = match scheme {
            "s3" => amazon(bucket, retry, variables),
            "gs" => google(bucket, retry, variables),
            "az" => azure(bucket, retry, variables),
            "memory" => Ok(Arc::new(InMemory::new()) as Arc<dyn ObjectStore>),
            _ => {
                return Err(Error::Url {
                    url,
                    problem: "it is not a store that is known; s3://, gs://, az:// and file:// are, and paths",
                });
            }
        };
        let objects = objects.map_err(|error| Error::settings(&url, &error, variables))?;
        let most_copied = if scheme == "s3" { S3_COPY_BYTES } else { u64::MAX };
        Ok(Store { url, objects, retry, most_copied })
    }
}

fn amazon(bucket: &str, retry: Duration, variables: &[(String, String)]) -> object_store::Result<Arc<dyn ObjectStore>> {
    let mut builder = AmazonS3Builder::new().with_client_options(client()).with_http_connector(Connector);
    for (key, value) in named(variables, "AWS_") {
        if let Ok(key) = key.parse() {
            builder = builder.with_config(key, value);
        }
    }
    Ok(Arc::new(builder.with_bucket_name(bucket).with_retry(retries(retry)).build()?))
}

fn google(bucket: &str, retry: Duration, variables: &[(String, String)]) -> object_store::Result<Arc<dyn ObjectStore>> {
    let mut builder = GoogleCloudStorageBuilder::new().with_client_options(client()).with_http_connector(Connector);
    if let Some((_, path)) = variables.iter().find(|(name, _)| name == "SERVICE_ACCOUNT") {
        builder = builder.with_config(GoogleConfigKey::ServiceAccount, path);
    }
    for (key, value) in named(variables, "GOOGLE_") {
        if let Ok(key) = key.parse() {
            builder = builder.with_config(key, value);
        }
    }
    Ok(Arc::new(builder.with_bucket_name(bucket).with_retry(retries(retry)).build()?))
}

fn azure(
    container: &str,
    retry: Duration,
    variables: &[(String, String)],
) -> object_store::Result<Arc<dyn ObjectStore>> {
    let mut builder = MicrosoftAzureBuilder::new().with_client_options(client()).with_http_connector(Connector);
    for (key, value) in named(variables, "AZURE_") {
        if let Ok(key) = key.parse() {
            builder = builder.with_config(key, value);
        }
    }
    if let Some((_, endpoint)) = variables.iter().find(|(name, _)| name == "IDENTITY_ENDPOINT") {
        builder = builder.with_config(AzureConfigKey::MsiEndpoint, endpoint);
    }
    Ok(Arc::new(builder.with_container_name(container).with_retry(retries(retry)).build()?))
}

/// Returns the variables with a prefix, their names in lower case, as the builders parse them.
fn named<'a>(variables: &'a [(String, String)], prefix: &'a str) -> impl Iterator<Item = (String, &'a str)> {
    let mine = variables.iter().filter(move |(name, _)| name.starts_with(prefix));
    mine.map(|(name, value)| (name.to_ascii_lowercase(), value.as_str()))
}

fn client() -> ClientOptions {
    ClientOptions::new().with_connect_timeout(Duration::from_secs(10)).with_timeout(REQUEST)
}

/// The limit of one request: a part of 16 MiB at 1 Mbit/s.
const REQUEST: Duration = Duration::from_secs(130);

/// The limit of S3's `CopyObject`.
const S3_COPY_BYTES: u64 = 5 << 30;

pub(crate) fn retries(limit: Duration) -> RetryConfig {
    let backoff = BackoffConfig { init_backoff: FIRST_PAUSE, max_backoff: LONGEST_PAUSE, base: 2.0 };
    // The time alone is the limit.
    RetryConfig { backoff, max_retries: if limit.is_zero() { 0 } else { usize::MAX }, retry_timeout: limit }
}

/// The first pause before a request is repeated.
pub(crate) const FIRST_PAUSE: Duration = Duration::from_millis(100);
/// The longest one.
pub(crate) const LONGEST_PAUSE: Duration = Duration::from_secs(10);
