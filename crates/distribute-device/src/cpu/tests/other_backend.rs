//! A CPU's behaviour with devices of another backend.

use super::*;
use crate::{DeviceMemory, DeviceSpec, PhysicalDevice};

/// A minimal device of another backend.
#[derive(Debug)]
struct Other(LogicalDevice);

impl DeviceMemory for Other {
    fn device(&self) -> &DeviceSpec {
        self.0.spec()
    }
    fn len_bytes(&self) -> usize {
        8
    }
}

impl Event for Other {
    fn device(&self) -> &DeviceSpec {
        self.0.spec()
    }
    fn is_ready(&self) -> Result<bool> {
        Ok(true)
    }
    fn wait(&self, _: Instant) -> Result<()> {
        Ok(())
    }
}

impl Device for Other {
    fn logical(&self) -> &LogicalDevice {
        &self.0
    }
    fn memory_use(&self) -> MemoryUse {
        MemoryUse { used_bytes: 0, limit_bytes: None }
    }
    fn allocate(&self, _: usize) -> Result<DeviceBuffer> {
        Ok(DeviceBuffer::new(Arc::new(Other(self.0.clone()))))
    }
    fn allocate_host(&self, len_bytes: usize) -> Result<HostBuffer> {
        HostBuffer::zeroed(len_bytes)
    }
    fn create_stream(&self) -> Result<Arc<dyn Stream>> {
        Err(Error::Dropped)
    }
    fn create_event(&self) -> Result<Arc<dyn Event>> {
        Ok(Arc::new(Other(self.0.clone())))
    }
    fn can_access_peer(&self, _: &dyn Device) -> bool {
        false
    }
    fn enable_peer_access(&self, _: &dyn Device) -> Result<()> {
        Err(Error::Dropped)
    }
}

#[test]
fn other_backends_are_met_with_sentences() {
    let physical =
        PhysicalDevice { kind: DeviceKind::Gpu, index: 0, name: "other".to_owned(), memory_bytes: None, cores: None };
    let gpu = Other(Devices::from_physical([physical]).logical()[0].clone());
    let devices = cpus(2);
    assert!(devices[0].can_access_peer(&*devices[1]));
    devices[0].enable_peer_access(&*devices[1]).unwrap();
    devices[0].enable_peer_access(&*devices[1]).unwrap();
    assert!(!devices[0].can_access_peer(&gpu));
    let error = devices[0].enable_peer_access(&gpu).unwrap_err().to_string();
    assert!(error.contains("GPU:0") && error.contains("through host memory"), "{error}");

    let stream = devices[0].create_stream().unwrap();
    let (a, foreign) = (devices[0].allocate(8).unwrap(), gpu.allocate(8).unwrap());
    let error = stream.copy_peer(&a, &foreign).unwrap_err().to_string();
    assert!(error.contains("GPU:0") && error.contains("stream 0 of CPU:0"), "{error}");
    let event = gpu.create_event().unwrap();
    assert!(matches!(stream.wait(&*event), Err(Error::Foreign { what: "event", .. })));
    assert!(matches!(stream.record(&*event), Err(Error::Foreign { what: "event", .. })));
    assert!(CpuDevice::with_bytes(&foreign, |_| ()).is_err());
}
