//! Parameters that say how they are to be split.

use std::cell::Cell;

use burn::module::{Content, Devices, Module, ModuleDisplay, ModuleDisplayDefault, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::{Device, Tensor};

/// A split that a layer asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Request {
    /// The axis along which the parameter is split.
    pub(crate) axis: usize,
    /// The number of blocks along the axis, each of which is divided.
    pub(crate) blocks: usize,
}

impl std::fmt::Display for Request {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "split along axis {} in {} blocks", self.axis, self.blocks)
    }
}

thread_local! {
    /// The request of the parameter that is being visited on this thread; burn's visitors have no way to carry it.
    static ANNOUNCED: Cell<Option<Request>> = const { Cell::new(None) };
}

/// Returns how the parameter that a visitor is called with is to be split, if it is.
pub(crate) fn announced() -> Option<Request> {
    ANNOUNCED.get()
}

/// A parameter that is to be split among the ranks of a tensor group. It has the path of the field that holds it, and
/// announces its request to visitors.
///
/// It is built whole, and remains so unless `scope` gives the replica a part of it.
#[derive(Clone, Debug)]
pub(super) struct SplitParam<const D: usize> {
    param: Param<Tensor<D>>,
    request: Request,
    /// The length of the whole along the axis.
    len: usize,
}

impl<const D: usize> SplitParam<D> {
    /// Creates a parameter from a whole one.
    pub(super) fn new(param: Param<Tensor<D>>, request: Request) -> SplitParam<D> {
        let len = param.lazy_shape().as_slice().get(request.axis).copied().unwrap_or(1);
        SplitParam { param, request, len }
    }

    /// Returns this rank's part of the value.
    pub(super) fn val(&self) -> Tensor<D> {
        self.param.val()
    }

    /// Returns the number of parts: of ranks in a tensor group, or 1.
    pub(super) fn parts(&self) -> usize {
        let own = self.param.lazy_shape().as_slice().get(self.request.axis).copied().unwrap_or(1);
        self.len / own.max(1)
    }

    /// Returns the length of the whole along the axis.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    fn with(self, change: impl FnOnce(Param<Tensor<D>>) -> Param<Tensor<D>>) -> SplitParam<D> {
        SplitParam { param: change(self.param), ..self }
    }
}

/// An announcement. It ends also if a visitor panics.
struct Announcement;

impl Announcement {
    fn begin(request: Request) -> Announcement {
        ANNOUNCED.set(Some(request));
        Announcement
    }
}

impl Drop for Announcement {
    fn drop(&mut self) {
        ANNOUNCED.set(None);
    }
}

impl<const D: usize> Module for SplitParam<D> {
    fn collect_devices(&self, devices: Devices) -> Devices {
        self.param.collect_devices(devices)
    }

    fn fork(self, device: &Device) -> Self {
        self.with(|param| param.fork(device))
    }

    fn to_device(self, device: &Device) -> Self {
        self.with(|param| Module::to_device(param, device))
    }

    fn train(self) -> Self {
        self.with(Module::train)
    }

    fn valid(&self) -> Self {
        self.clone().with(|param| Module::valid(&param))
    }

    fn materialize(self) -> Self {
        self.with(Module::materialize)
    }

    fn visit<V: ModuleVisitor>(&self, visitor: &mut V) {
        let _announcement = Announcement::begin(self.request);
        self.param.visit(visitor);
    }

    fn map<M: ModuleMapper>(self, mapper: &mut M) -> Self {
        let _announcement = Announcement::begin(self.request);
        self.with(|param| Module::map(param, mapper))
    }
}

impl<const D: usize> ModuleDisplayDefault for SplitParam<D> {
    fn content(&self, content: Content) -> Option<Content> {
        self.param.content(content)
    }
}

impl<const D: usize> ModuleDisplay for SplitParam<D> {}
