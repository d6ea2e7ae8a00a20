//! Callbacks of which only the chief's reports, in jobs whose chief changes.

use std::time::Duration;

use distribute_cluster::Membership;
use distribute_strategy::{CommunicationOptions, MultiWorkerMirroredStrategy};
use distribute_testkit::Ports;

use super::*;

/// Returns the strategies of the chief and of the other worker of a job.
pub(in crate::callbacks) fn two_workers() -> [Strategy; 2] {
    let address = format!("127.0.0.1:{}", Ports::reserve(1).unwrap().release()[0]);
    let worker = |rank: u32| {
        MultiWorkerMirroredStrategy::builder()
            .membership(Membership::new(rank, 2, &address).unwrap())
            .communication(CommunicationOptions::default().timeout(Duration::from_secs(30)))
            .build()
            .unwrap()
    };
    let worker = &worker;
    std::thread::scope(|scope| {
        [0, 1].map(|rank| scope.spawn(move || worker(rank))).map(|worker| worker.join().unwrap())
    })
}

#[cfg(feature = "status")]
mod servers {
    use std::io::{Read, Write};
    use std::net::{SocketAddr, TcpStream};

    use super::*;

    /// Creates a callback that serves at an address, and returns the one that it got.
    type Serve = fn(&str) -> (Box<dyn Callback>, SocketAddr);

    const SERVERS: &[Serve] = &[
        |address| {
            let page = StatusPage::serve(address).unwrap();
            let address = page.address();
            (Box::new(page), address)
        },
        #[cfg(feature = "prometheus")]
        |address| {
            let endpoint = Prometheus::serve(address).unwrap();
            let address = endpoint.address();
            (Box::new(endpoint), address)
        },
    ];

    /// Returns whether metrics are served at an address.
    fn answers(address: SocketAddr) -> bool {
        let Ok(mut stream) = TcpStream::connect(address) else { return false };
        stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        write!(stream, "GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        text.starts_with("HTTP/1.1 200 OK")
    }

    #[test]
    fn workers_of_one_host_may_be_given_one_address_and_the_chief_gets_it() {
        let [chief, other] = two_workers();
        for serve in SERVERS {
            // The other worker is the first to take the port.
            let (mut of_other, address) = serve("127.0.0.1:0");
            let (mut of_chief, same) = serve(&address.to_string());
            assert_eq!(address, same);
            std::thread::scope(|scope| {
                let begins = scope.spawn(|| {
                    let mut toy = Toy { strategy: chief.clone(), ..Toy::new() };
                    toy.show(&[], |training| of_chief.train_begin(training))
                });
                let mut toy = Toy { strategy: other.clone(), ..Toy::new() };
                toy.show(&[], |training| of_other.train_begin(training)).unwrap();
                begins.join().unwrap().unwrap();
            });
            assert!(answers(address));
        }
    }

    #[test]
    fn the_chief_serves_while_it_is_the_chief() {
        let [chief, other] = two_workers();
        for serve in SERVERS {
            let (mut callback, address) = serve("127.0.0.1:0");
            let mut toy = Toy { strategy: other.clone(), ..Toy::new() };
            toy.show(&[], |training| callback.train_begin(training)).unwrap();
            for (strategy, serves) in [(&other, false), (&chief, true), (&chief, true), (&other, false), (&chief, true)]
            {
                toy.strategy = strategy.clone();
                toy.show(&[], |training| callback.members_changed(training)).unwrap();
                assert_eq!(answers(address), serves);
            }
            // A port that another process has does not end a training that has lost its chief.
            toy.strategy = other.clone();
            toy.show(&[], |training| callback.members_changed(training)).unwrap();
            let _taken = std::net::TcpListener::bind(address).unwrap();
            toy.strategy = chief.clone();
            toy.show(&[], |training| callback.members_changed(training)).unwrap();
        }
    }
}
