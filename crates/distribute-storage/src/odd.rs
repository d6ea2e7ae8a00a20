//! A store in memory that differs from others as real stores do.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::future::BoxFuture;
use futures_util::stream::{self, BoxStream, StreamExt};
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{
    CopyOptions, Error, GetOptions, GetResult, GetResultPayload, ListResult, MultipartUpload, ObjectMeta, ObjectStore,
    ObjectStoreExt, PutMode, PutMultipartOptions, PutOptions, PutPayload, PutResult, Result, UploadPart,
};

use crate::Location;
use crate::connect::Store;

#[derive(Debug, Default)]
pub(crate) struct Odd {
    pub(crate) inner: InMemory,
    /// It writes over an object where a new one was to be created.
    pub(crate) overlooks_conditions: bool,
    /// Objects may be written and not looked at.
    pub(crate) is_write_only: bool,
    /// The number of answers to reads that are a byte short.
    pub(crate) short: AtomicUsize,
    /// It copies no larger object.
    pub(crate) most_copied: Option<u64>,
    /// It completes no upload.
    pub(crate) completes_none: bool,
    /// The number of uploads that were given up.
    pub(crate) given_up: Arc<AtomicUsize>,
}

impl Odd {
    /// Returns an object in the store, whose own copies are used up to a length.
    pub(crate) fn at(self: &Arc<Odd>, path: &str, most_copied: u64) -> Location {
        let objects: Arc<dyn ObjectStore> = Arc::<Odd>::clone(self);
        let store = Store { url: "s3://odd".to_owned(), objects, retry: Duration::from_secs(5), most_copied };
        Location { store: Arc::new(store), path: Path::from(path) }
    }
}

impl fmt::Display for Odd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("odd")
    }
}

fn refused(path: &Path) -> Error {
    Error::PermissionDenied { path: path.to_string(), source: "as planned".into() }
}

impl ObjectStore for Odd {
    fn put_opts<'a, 'b, 'c>(
        &'a self,
        location: &'b Path,
        payload: PutPayload,
        mut options: PutOptions,
    ) -> BoxFuture<'c, Result<PutResult>>
    where
        'a: 'c,
        'b: 'c,
        Self: 'c,
    {
        if self.overlooks_conditions {
            options.mode = PutMode::Overwrite;
        }
        self.inner.put_opts(location, payload, options)
    }

    fn put_multipart_opts<'a, 'b, 'c>(
        &'a self,
        location: &'b Path,
        options: PutMultipartOptions,
    ) -> BoxFuture<'c, Result<Box<dyn MultipartUpload>>>
    where
        'a: 'c,
        'b: 'c,
        Self: 'c,
    {
        Box::pin(async move {
            let parts = self.inner.put_multipart_opts(location, options).await?;
            let (given_up, completes_none) = (Arc::clone(&self.given_up), self.completes_none);
            Ok(Box::new(Parts { parts, completes_none, given_up }) as Box<dyn MultipartUpload>)
        })
    }

    fn get_opts<'a, 'b, 'c>(&'a self, location: &'b Path, options: GetOptions) -> BoxFuture<'c, Result<GetResult>>
    where
        'a: 'c,
        'b: 'c,
        Self: 'c,
    {
        Box::pin(async move {
            if self.is_write_only {
                return Err(refused(location));
            }
            let is_look = options.head;
            let mut found = self.inner.get_opts(location, options).await?;
            let less = |left: usize| left.checked_sub(1);
            if !is_look && self.short.fetch_update(Ordering::SeqCst, Ordering::SeqCst, less).is_ok() {
                let (meta, range, attributes) = (found.meta.clone(), found.range.clone(), found.attributes.clone());
                let extensions = found.extensions.clone();
                let mut bytes = found.bytes().await?;
                bytes.truncate(bytes.len() - 1);
                let payload = GetResultPayload::Stream(stream::once(async { Ok(bytes) }).boxed());
                found = GetResult { payload, meta, range, attributes, extensions };
            }
            Ok(found)
        })
    }

    fn delete_stream(&self, locations: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        self.inner.delete_stream(locations)
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.inner.list(prefix)
    }

    fn list_with_delimiter<'a, 'b, 'c>(&'a self, prefix: Option<&'b Path>) -> BoxFuture<'c, Result<ListResult>>
    where
        'a: 'c,
        'b: 'c,
        Self: 'c,
    {
        self.inner.list_with_delimiter(prefix)
    }

    fn copy_opts<'a, 'b, 'c, 'd>(
        &'a self,
        from: &'b Path,
        to: &'c Path,
        options: CopyOptions,
    ) -> BoxFuture<'d, Result<()>>
    where
        'a: 'd,
        'b: 'd,
        'c: 'd,
        Self: 'd,
    {
        Box::pin(async move {
            let bytes = self.inner.head(from).await?.size;
            match self.most_copied.is_some_and(|most| bytes > most) {
                true => Err(refused(from)),
                false => self.inner.copy_opts(from, to, options).await,
            }
        })
    }
}

#[derive(Debug)]
struct Parts {
    parts: Box<dyn MultipartUpload>,
    completes_none: bool,
    given_up: Arc<AtomicUsize>,
}

impl MultipartUpload for Parts {
    fn put_part(&mut self, data: PutPayload) -> UploadPart {
        self.parts.put_part(data)
    }

    fn complete<'a, 'b>(&'a mut self) -> BoxFuture<'b, Result<PutResult>>
    where
        'a: 'b,
        Self: 'b,
    {
        match self.completes_none {
            true => Box::pin(async { Err(refused(&Path::default())) }),
            false => self.parts.complete(),
        }
    }

    fn abort<'a, 'b>(&'a mut self) -> BoxFuture<'b, Result<()>>
    where
        'a: 'b,
        Self: 'b,
    {
        self.given_up.fetch_add(1, Ordering::SeqCst);
        self.parts.abort()
    }
}
