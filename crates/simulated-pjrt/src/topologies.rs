//! Topologies.
#![expect(unsafe_code, reason = "functions of C, under the names of C")]

use std::sync::Arc;

use pjrt_sys::{
    ClientTopologyDescriptionArgs, Code, CompileArgs, TopologyDescription, TopologyDescriptionAttributesArgs,
    TopologyDescriptionCreateArgs, TopologyDescriptionDestroyArgs, TopologyDescriptionGetDeviceDescriptionsArgs,
    TopologyDescriptionPlatformNameArgs, TopologyDescriptionPlatformVersionArgs,
};

use crate::clients::{Client, devices, pointers};
use crate::failure::{Failure, Kind, give, take};
use crate::programs::{Program, give_program};
use crate::table::functions;

/// # Safety
/// The pointer is a client, whose parts a topology has, or a topology.
unsafe fn topology<'a>(topology: *const TopologyDescription) -> &'a Client {
    // SAFETY: guaranteed by the caller.
    unsafe { &*topology.cast::<Client>() }
}

functions! {
    fn of_client(arguments: ClientTopologyDescriptionArgs) {
        arguments.topology = arguments.client.cast();
        Ok(())
    }

    fn create(arguments: TopologyDescriptionCreateArgs) {
        // SAFETY: the caller passes a name of this size.
        let name = unsafe {
            std::slice::from_raw_parts(arguments.topology_name.cast::<u8>(), arguments.topology_name_size)
        };
        let name = String::from_utf8_lossy(name);
        let count = name.strip_prefix("sim:").and_then(|count| count.parse::<usize>().ok());
        let wrong = || Failure::new(Code::INVALID_ARGUMENT, format!("the topology {name:?} is not known"));
        let devices = devices(count.ok_or_else(wrong)?);
        let pointers = pointers(&devices);
        arguments.topology = give(Kind::Topology, Client { devices: Arc::clone(&devices), pointers });
        Ok(())
    }

    fn destroy(arguments: TopologyDescriptionDestroyArgs) {
        // SAFETY: the caller passes its topology.
        unsafe { take::<Client, _>(Kind::Topology, arguments.topology) };
        Ok(())
    }

    fn platform_name(arguments: TopologyDescriptionPlatformNameArgs) {
        (arguments.platform_name, arguments.platform_name_size) = (c"simulated".as_ptr(), 9);
        Ok(())
    }

    fn platform_version(arguments: TopologyDescriptionPlatformVersionArgs) {
        (arguments.platform_version, arguments.platform_version_size) = (c"simulated 1".as_ptr(), 11);
        Ok(())
    }

    fn descriptions(arguments: TopologyDescriptionGetDeviceDescriptionsArgs) {
        // SAFETY: the caller passes its topology.
        let list = &unsafe { topology(arguments.topology) }.pointers;
        (arguments.descriptions, arguments.num_descriptions) = (list.as_ptr().cast(), list.len());
        Ok(())
    }

    fn attributes(arguments: TopologyDescriptionAttributesArgs) {
        (arguments.attributes, arguments.num_attributes) = (std::ptr::null(), 0);
        Ok(())
    }

    fn compile(arguments: CompileArgs) {
        // SAFETY: the caller passes a program and options.
        let program = unsafe {
            Program::new(arguments.program, arguments.compile_options, arguments.compile_options_size)
        }?;
        arguments.executable = give_program(program);
        Ok(())
    }
}
