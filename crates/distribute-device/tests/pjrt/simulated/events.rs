//! Events: late, never, and with errors.

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use distribute_device::pjrt::{ElementType, ExecuteOptions};
use distribute_device::{Error, HostBuffer};
use distribute_types::{ErrorClass, FailureKind};
use simulated_pjrt::{Fail, Live, Script};

use super::{Simulated, arguments, borrowed, briefly, compile, stuck};
use crate::programs::soon;

#[test]
fn copies_and_executions_that_end_late_are_waited_for() {
    let kinds = ["host", "ready", "download", "execute"];
    let late_ms = kinds.map(|kind| (kind.to_owned(), 30)).into();
    let simulated = Simulated::new(&Script { late_ms, ..Script::default() });
    let client = simulated.client();
    let memory = Arc::new(HostBuffer::from_slice(&[1f32, 2.0]).unwrap());
    let weak = Arc::downgrade(&memory);
    let buffer = client.devices()[0].upload(ElementType::F32, &[2], memory).unwrap();
    // The plugin still reads it.
    assert!(weak.upgrade().is_some());
    let ready = buffer.ready().unwrap();
    assert!(!ready.is_done() && matches!(ready.wait(Instant::now()), Err(Error::Deadline { .. })));
    ready.wait(soon()).unwrap();
    let download = buffer.download().unwrap();
    assert!(!download.is_done());
    assert_eq!(download.wait(soon()).unwrap().as_slice::<f32>().unwrap(), [1.0, 2.0]);
    assert!(weak.upgrade().is_none());

    let executable = compile(&client, 2, false).unwrap();
    let given = arguments(&executable).unwrap();
    let execution = executable.launch(&borrowed(&given), &ExecuteOptions::new()).unwrap();
    assert!(!execution.is_done());
    execution.wait(soon()).unwrap();
    drop((client, buffer, executable, given, execution));
    assert_eq!(simulated.live(), Live::default());
}

#[test]
fn events_that_never_fire_end_at_the_deadline_and_leak_a_bounded_amount() {
    for kind in ["host", "ready", "download", "execute"] {
        let simulated = Simulated::new(&stuck(kind));
        let client = simulated.client();
        let executable = compile(&client, 2, false).unwrap();
        let memory = Arc::new(HostBuffer::from_slice(&[1f32; 4]).unwrap());
        let weak: Weak<HostBuffer> = Arc::downgrade(&memory);
        let buffer = client.devices()[0].upload(ElementType::F32, &[4], memory).unwrap();
        let started = Instant::now();
        let late = match kind {
            "host" => None,
            "ready" => Some(buffer.ready().unwrap().wait(briefly()).unwrap_err()),
            "download" => Some(buffer.read(briefly()).unwrap_err()),
            _ => {
                let given = arguments(&executable).unwrap();
                Some(executable.execute(&borrowed(&given), briefly()).unwrap_err())
            }
        };
        if let Some(late) = late {
            assert!(matches!(late, Error::Deadline { .. }), "{kind}: {late}");
            assert!(late.to_string().contains("device 0 (SIM_0)"), "{kind}: {late}");
            assert!(started.elapsed() < Duration::from_secs(5), "{kind}");
        }
        let plugin = client.plugin().clone();
        drop((buffer, executable, client));
        // The client cannot be destroyed, and memory that the plugin reads is not freed.
        assert_eq!(plugin.abandoned_clients(), 1, "{kind}");
        let left = Live { clients: 1, events: simulated.live().events, ..Live::default() };
        assert_eq!((simulated.live(), left.events > 0), (left, true), "{kind}");
        assert_eq!(weak.upgrade().is_some(), kind == "host", "{kind}");
        // Callbacks that come after everything was dropped find what they need.
        simulated.installed.release();
        assert_eq!(simulated.live(), Live { clients: 1, ..Live::default() }, "{kind}");
        assert!(weak.upgrade().is_none(), "{kind}");
    }
}

#[test]
fn a_device_that_is_lost_is_named_while_others_wait_for_it() {
    // The second of two devices fails, and the first one never ends.
    let event_errors = vec![Fail::new("execute", 2, 14, "the device is lost")];
    let simulated = Simulated::new(&Script { event_errors, ..stuck("execute") });
    let client = simulated.client();
    let executable = compile(&client, 2, false).unwrap();
    let given = arguments(&executable).unwrap();
    let started = Instant::now();
    let error = executable.execute(&borrowed(&given), soon()).unwrap_err();
    assert!(started.elapsed() < Duration::from_secs(20), "it waits for the device that does not end");
    assert_eq!(
        error.to_string(),
        "program \"step\" on device 1 (SIM_1): PJRT_LoadedExecutable_Execute failed: UNAVAILABLE (code 14): the device \
         is lost"
    );
    assert_eq!(error.class().kind, FailureKind::Retryable);
    // Once the first one has ended, the next execution is as before.
    simulated.installed.release();
    executable.execute(&borrowed(&given), soon()).unwrap();

    let late_ms = [("execute".to_owned(), 60_000)].into();
    let fail = vec![Fail::new("PJRT_LoadedExecutable_Execute", 1, 14, "the device is lost")];
    let simulated = Simulated::new(&Script { fail, late_ms, ..Script::default() });
    let client = simulated.client();
    let executable = compile(&client, 2, false).unwrap();
    let given = arguments(&executable).unwrap();
    let error = executable.execute(&borrowed(&given), soon()).unwrap_err().to_string();
    assert!(error.starts_with("program \"step\": PJRT_LoadedExecutable_Execute failed: UNAVAILABLE"), "{error}");
}

#[test]
fn errors_of_copies_reach_who_waits_for_them() {
    let error = |kind: &str| Script { event_errors: vec![Fail::new(kind, 1, 15, "bits")], ..Script::default() };
    let simulated = Simulated::new(&error("download"));
    let client = simulated.client();
    let buffer = client.devices()[2].upload_slice(&[1f32], &[]).unwrap();
    let failed = buffer.read(soon()).unwrap_err().to_string();
    assert_eq!(failed, "a buffer on device 2 (SIM_2): PJRT_Buffer_ToHostBuffer failed: DATA_LOSS (code 15): bits");
    assert_eq!(buffer.to_vec::<f32>(soon()).unwrap(), [1.0]);
    let simulated = Simulated::new(&error("ready"));
    let buffer = simulated.client().devices()[0].upload_slice(&[1f32], &[]).unwrap();
    assert!(matches!(buffer.ready().unwrap().wait(soon()), Err(Error::Pjrt { code: 15, name: "DATA_LOSS", .. })));
    drop(buffer);
    assert_eq!(simulated.live(), Live::default());
}
