//! Plugins in which a function fails or is missing.

use distribute_device::pjrt::{ElementType, ExecuteOptions};
use distribute_device::{Error, HostBuffer};
use pjrt_sys::Function;
use simulated_pjrt::{Fail, Live, Script};

use super::{Simulated, arguments, borrowed, compile, use_everything};
use crate::programs::soon;

/// Functions that this crate calls and whose failures it cannot report: they free something.
fn frees(function: Function) -> bool {
    function.name().ends_with("_Destroy")
}

#[test]
fn a_function_that_fails_is_an_error_that_names_it_and_nothing_is_left() {
    let mut named = 0;
    for function in Function::ALL {
        let name = function.name();
        let fail = vec![Fail::new(name, 0, 13, "scripted")];
        let simulated = Simulated::new(&Script { fail, ..Script::default() });
        let result = simulated.open().and_then(|plugin| use_everything(&plugin));
        if let Err(error) = result {
            let text = error.to_string();
            assert!(text.contains(&format!("{name} failed: INTERNAL (code 13): scripted")), "{name}: {text}");
            named += 1;
        }
        if !frees(*function) {
            assert_eq!(simulated.live(), Live::default(), "{name}");
        }
    }
    // As many functions as `use_everything` calls, but those that free, those whose failure is not one, and those of
    // errors.
    assert!(named >= 45, "{named}");
}

#[test]
fn a_function_that_is_missing_is_an_error_that_names_it() {
    for function in Function::ALL.iter().copied().filter(|function| !function.name().starts_with("PJRT_Error_")) {
        let null = vec![function.name().to_owned()];
        let simulated = Simulated::new(&Script { null, ..Script::default() });
        let result = simulated.open().and_then(|plugin| use_everything(&plugin));
        if let Err(error) = result {
            assert!(matches!(error, Error::PjrtPlugin { .. }), "{error}");
            assert!(error.to_string().contains(function.name()), "{error}");
        }
    }
}

#[test]
fn tables_of_every_length_are_refused_or_lack_what_is_told() {
    for functions in 0..=Function::ALL.len() {
        let simulated = Simulated::new(&Script { functions: Some(functions), ..Script::default() });
        if let Err(error) = simulated.open().and_then(|plugin| use_everything(&plugin)) {
            let missing = Function::ALL[functions..].iter().any(|function| error.to_string().contains(function.name()));
            assert!(missing || functions < 3, "{functions}: {error}");
        } else {
            assert!(functions > Function::PJRT_Client_TopologyDescription.index(), "{functions}");
        }
    }
}

#[test]
fn sizes_are_compared_before_the_plugin_is_asked() {
    let simulated = Simulated::new(&Script::default());
    let client = simulated.client();
    let device = &client.devices()[0];
    let refused = |dims: &[usize]| {
        let memory = HostBuffer::zeroed(16).unwrap();
        device.upload(ElementType::F32, dims, memory).unwrap_err().to_string()
    };
    assert!(refused(&[3]).contains("f32[3] for device 0 (SIM_0) needs 12 bytes, and 16 were given"));
    for dims in [vec![usize::MAX, 2], vec![1 << 62], vec![1 << 63, 0], vec![1 << 32, 1 << 32]] {
        assert!(refused(&dims).contains("is too large"), "{dims:?}");
    }
    let matrix = device.upload(ElementType::F32, &[2, 2], HostBuffer::zeroed(16).unwrap()).unwrap();
    // The plugin refuses all but the row-major order.
    assert_eq!(matrix.to_vec::<f32>(soon()).unwrap(), [0.0; 4]);

    let executable = compile(&client, 2, true).unwrap();
    let given = arguments(&executable).unwrap();
    let text = |lists: &[Vec<_>]| executable.execute(lists, soon()).unwrap_err().to_string();
    assert!(text(&[]).contains("0 lists of arguments"));
    let one = text(&[vec![&given[0][0]], vec![&given[1][0]]]);
    assert!(one.contains("Attempted to execute with 2 lists of 1 arguments"), "{one}");
    let swapped = text(&[vec![&given[1][0], &given[1][1]], vec![&given[0][0], &given[0][1]]]);
    assert!(swapped.contains("argument 0 for device 0 (SIM_0) is on device 1 (SIM_1)"), "{swapped}");
    // Nothing was donated by executions that were refused.
    assert!(!given[0][0].is_deleted().unwrap());
    let kept = executable.launch(&borrowed(&given), &ExecuteOptions::new().keeping([0])).unwrap();
    kept.wait(soon()).unwrap();
    assert!(!given[0][0].is_deleted().unwrap());
    executable.execute(&borrowed(&given), soon()).unwrap();
    let gone = text(&borrowed(&given));
    assert!(gone.contains("argument 0 for device 0 (SIM_0) was deleted or donated before"), "{gone}");
}
