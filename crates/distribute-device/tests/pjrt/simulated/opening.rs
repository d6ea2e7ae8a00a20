//! Opening a plugin and creating a client: time limits, and the store by which processes meet.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::thread::sleep;
use std::time::{Duration, Instant};

use distribute_device::Error;
use distribute_device::pjrt::{Client, ClientOptions, CompileOptions, KeyValueError, KeyValueStore, Plugin, Search};
use simulated_pjrt::{Fail, Live, Script};

use super::{Simulated, briefly, compile};
use crate::programs::{soon, step};

fn slow(function: &str) -> Simulated {
    Simulated::new(&Script { slow_ms: [(function.to_owned(), 300)].into(), ..Script::default() })
}

/// Waits for threads that were abandoned to end.
fn until_nothing_is_left(simulated: &Simulated) {
    let end = soon();
    while simulated.live() != Live::default() {
        assert!(Instant::now() < end, "{:?}", simulated.live());
        sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_plugin_that_starts_slowly_is_opened_later() {
    let simulated = slow("PJRT_Plugin_Initialize");
    let search = Search::file(simulated.installed.path());
    for _ in 0..2 {
        // The second finds the first at work, and waits for it as long as it may.
        let error = Plugin::open(&search, briefly()).unwrap_err();
        assert!(matches!(error, Error::Deadline { .. }), "{error}");
        assert!(error.to_string().contains("the initialisation of "), "{error}");
    }
    let plugin = Plugin::open(&search, soon()).unwrap();
    assert_eq!(plugin.path(), simulated.installed.path());
}

#[test]
fn a_plugin_that_does_not_start_is_tried_again() {
    let fail = vec![Fail::new("PJRT_Plugin_Initialize", 1, 10, "another process uses it")];
    let simulated = Simulated::new(&Script { fail, ..Script::default() });
    let error = simulated.open().unwrap_err().to_string();
    assert!(error.contains("PJRT_Plugin_Initialize failed: ABORTED (code 10): another process uses it"), "{error}");
    simulated.open().unwrap();
}

#[test]
fn slow_clients_and_compilations_are_abandoned_at_the_deadline() {
    let simulated = slow("PJRT_Client_Create");
    let plugin = simulated.open().unwrap();
    let error = Client::create(&plugin, ClientOptions::new(), briefly()).unwrap_err();
    assert!(matches!(&error, Error::Deadline { operation, .. } if operation.contains("client")), "{error}");
    sleep(Duration::from_millis(400));
    until_nothing_is_left(&simulated);

    let simulated = slow("PJRT_Client_Compile");
    let client = simulated.client();
    let error = client.compile(step(1, false), &CompileOptions::default(), briefly()).unwrap_err();
    assert!(matches!(&error, Error::Deadline { operation, .. } if operation.contains("compilation")), "{error}");
    compile(&client, 1, false).unwrap();
    drop(client);
    until_nothing_is_left(&simulated);
}

/// A store in memory.
#[derive(Default)]
struct Store {
    values: Mutex<HashMap<Vec<u8>, Vec<u8>>>,
    fails: bool,
    panics: bool,
}

impl KeyValueStore for Store {
    fn get(&self, key: &[u8], timeout: Duration) -> Result<Option<Vec<u8>>, KeyValueError> {
        let end = Instant::now() + timeout;
        loop {
            match self.try_get(key)? {
                None if Instant::now() < end => sleep(Duration::from_millis(1)),
                answer => return Ok(answer),
            }
        }
    }

    fn try_get(&self, key: &[u8]) -> Result<Option<Vec<u8>>, KeyValueError> {
        Ok(self.values.lock().unwrap().get(key).cloned())
    }

    fn put(&self, key: &[u8], value: &[u8]) -> Result<(), KeyValueError> {
        assert!(!self.panics, "a panic of the store");
        if self.fails {
            return Err("the coordinator is away".into());
        }
        self.values.lock().unwrap().insert(key.to_vec(), value.to_vec());
        Ok(())
    }
}

#[test]
fn a_client_uses_the_store_that_it_is_given() {
    let simulated = Simulated::new(&Script::default());
    let plugin = simulated.open().unwrap();
    let create = |store: &Arc<Store>| {
        let store: Arc<dyn KeyValueStore> = store.clone();
        Client::create(&plugin, ClientOptions::new().with_key_value_store(store), soon())
    };
    let store = Arc::new(Store::default());
    let client = create(&store).unwrap();
    assert_eq!(store.values.lock().unwrap()[b"simulated/key".as_slice()], b"a\0value");
    assert_eq!(Arc::strong_count(&store), 2);
    drop(client);
    assert_eq!(Arc::strong_count(&store), 1, "the store is given back");

    let failed = create(&Arc::new(Store { fails: true, ..Store::default() })).unwrap_err().to_string();
    assert!(failed.contains("INTERNAL (code 13): the coordinator is away"), "{failed}");
    let panicked = create(&Arc::new(Store { panics: true, ..Store::default() })).unwrap_err().to_string();
    assert!(panicked.contains("INTERNAL (code 13): the key-value store panicked"), "{panicked}");
    assert_eq!(simulated.live(), Live::default());
}
