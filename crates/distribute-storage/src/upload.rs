//! Objects that are written in parts.

use std::collections::VecDeque;

use bytes::Bytes;
use object_store::{MultipartUpload, ObjectStoreExt};

use crate::location::Asked;
use crate::runtime::{self, Pending};
use crate::{Error, Location, Result};

/// The length in bytes of every part of an upload but the last. With 10 000 parts, an object of S3 has up to 156 GiB.
pub const PART_BYTES: usize = 16 << 20;

/// How many parts are under way at a time: four fill a connection of 10 Gbit/s at 50 ms, in 64 MiB of memory.
const AT_A_TIME: usize = 4;

/// A new object that is written in parts, some at the same time. It appears when it is complete, as a whole, and
/// replaces one of the same name. An upload that is dropped earlier leaves nothing to be seen; its parts are removed if
/// the store can be reached. A process that is killed leaves them: stores remove incomplete uploads by a rule on the
/// bucket.
///
/// # Examples
/// ```
/// use distribute_storage::{Location, PART_BYTES};
///
/// let place = Location::open("memory://example/large")?;
/// let mut upload = place.upload()?;
/// upload.push(vec![1; PART_BYTES])?;
/// upload.push(vec![2; 10])?;
/// assert_eq!(place.meta()?, None);
/// upload.finish()?;
/// assert_eq!(place.meta()?.map(|meta| meta.bytes), Some(PART_BYTES as u64 + 10));
/// # Ok::<(), distribute_storage::Error>(())
/// ```
#[derive(Debug)]
pub struct Upload {
    location: Location,
    /// `None` once it is complete.
    parts: Option<Box<dyn MultipartUpload>>,
    under_way: VecDeque<Pending<()>>,
    /// The bytes pushed so far.
    bytes: u64,
}

impl Location {
    /// Starts an upload in parts.
    pub fn upload(&self) -> Result<Upload> {
        // An upload that is begun twice leaves one without parts.
        let begin =
            async |asked: Asked| asked.objects.put_multipart(&asked.path).await.map_err(|error| asked.error(&error));
        let parts = self.start("beginning to write", begin)?.wait()?;
        Ok(Upload { location: self.clone(), parts: Some(parts), under_way: VecDeque::new(), bytes: 0 })
    }

    /// Runs a request that cannot be made again.
    fn once<T: Send + 'static>(
        &self,
        action: &'static str,
        request: impl Future<Output = object_store::Result<T>> + Send + 'static,
    ) -> Result<Pending<T>> {
        let asked = self.asked(action);
        let named = async move { request.await.map_err(|error| asked.error(&error)) };
        runtime::start(self.url(), action, self.store.limit(), named)
    }
}

impl Upload {
    /// Sends a part of [`PART_BYTES`], or a shorter one that is the last. Returns when fewer than four are under way.
    ///
    /// # Errors
    /// [`Error::Connection`] and the other errors of a [`Location`], for this part or an earlier one.
    pub fn push(&mut self, part: impl Into<Bytes>) -> Result<()> {
        let part = part.into();
        while self.under_way.len() >= AT_A_TIME {
            self.wait_for_one()?;
        }
        if let Some(parts) = &mut self.parts {
            self.bytes += part.len() as u64;
            let sent = parts.put_part(part.into());
            self.under_way.push_back(self.location.once("writing a part of", sent)?);
        }
        Ok(())
    }

    /// Waits until all parts are written, and makes the object appear.
    ///
    /// # Errors
    /// [`Error::Connection`] and the other errors of a [`Location`]; the object has then most likely not changed: it is
    /// looked at again if the answer to the last request was lost.
    pub fn finish(mut self) -> Result<()> {
        while !self.under_way.is_empty() {
            self.wait_for_one()?;
        }
        let before = match self.location.meta() {
            // A credential may be allowed to write and not to look.
            Err(Error::Denied { .. }) => None,
            looked => looked?,
        };
        let Some(mut parts) = self.parts.take() else { return Ok(()) };
        let complete = async move { Ok((parts.complete().await, parts)) };
        let (outcome, parts) = self.location.once("completing", complete)?.wait()?;
        let Err(error) = outcome.map_err(|error| self.location.asked("completing").error(&error)) else {
            return Ok(());
        };
        // The answer may have been lost. The store's client asks again then, and a store that has completed the upload
        // may know no upload of this name.
        if (error.is_retryable() || matches!(error, Error::NotFound { .. }))
            && let Ok(Some(now)) = self.location.meta()
            && before.as_ref() != Some(&now)
            && now.bytes == self.bytes
        {
            return Ok(());
        }
        // They are removed with this upload.
        self.parts = Some(parts);
        Err(error)
    }

    fn wait_for_one(&mut self) -> Result<()> {
        self.under_way.pop_front().map_or(Ok(()), Pending::wait)
    }
}

impl Drop for Upload {
    fn drop(&mut self) {
        self.under_way.clear();
        if let Some(mut parts) = self.parts.take() {
            let abort = self.location.once("giving up", async move { parts.abort().await });
            // It is not waited for: what is not removed does no harm.
            if let Ok(abort) = abort {
                abort.detach();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::pin::Pin;
    use std::sync::Arc;
    use std::sync::atomic::Ordering;
    use std::time::{Duration, Instant};

    use object_store::{PutPayload, PutResult, UploadPart};

    use super::*;
    use crate::odd::Odd;

    type Answer<'a, T> = Pin<Box<dyn Future<Output = object_store::Result<T>> + Send + 'a>>;

    /// Parts of a store that completes an upload or not, and answers that there is none.
    #[derive(Debug)]
    struct Forgotten {
        parts: Box<dyn MultipartUpload>,
        completes: bool,
    }

    impl MultipartUpload for Forgotten {
        fn put_part(&mut self, data: PutPayload) -> UploadPart {
            self.parts.put_part(data)
        }

        fn complete<'a, 'b>(&'a mut self) -> Answer<'b, PutResult>
        where
            'a: 'b,
            Self: 'b,
        {
            Box::pin(async move {
                if self.completes {
                    self.parts.complete().await?;
                }
                Err(object_store::Error::NotFound { path: "upload".to_owned(), source: "NoSuchUpload".into() })
            })
        }

        fn abort<'a, 'b>(&'a mut self) -> Answer<'b, ()>
        where
            'a: 'b,
            Self: 'b,
        {
            self.parts.abort()
        }
    }

    #[test]
    fn an_upload_that_is_complete_and_forgotten_is_looked_for() {
        for completes in [true, false] {
            let place = Location::open(&format!("memory://upload/forgotten-{completes}")).unwrap();
            let mut upload = place.upload().unwrap();
            let parts = upload.parts.take().unwrap();
            upload.parts = Some(Box::new(Forgotten { parts, completes }));
            upload.push("content").unwrap();
            let outcome = upload.finish();
            match completes {
                true => assert_eq!((outcome.unwrap(), place.read(10).unwrap().as_ref()), ((), "content".as_bytes())),
                false => assert!(matches!(outcome, Err(Error::NotFound { .. }))),
            }
        }
    }

    #[test]
    fn an_upload_that_the_store_does_not_complete_is_given_up() {
        let store = Arc::new(Odd { completes_none: true, ..Odd::default() });
        let mut upload = store.at("a", u64::MAX).upload().unwrap();
        upload.push("content").unwrap();
        assert!(matches!(upload.finish(), Err(Error::Denied { .. })));
        let until = Instant::now() + Duration::from_secs(10);
        while store.given_up.load(Ordering::SeqCst) == 0 && Instant::now() < until {
            std::thread::yield_now();
        }
        assert_eq!(store.given_up.load(Ordering::SeqCst), 1);
    }

    #[test]
    fn parts_come_in_their_order_and_nothing_is_seen_before_the_end() {
        let place = Location::open("memory://upload/object").unwrap();
        let parts: Vec<Vec<u8>> = (0..9).map(|part| vec![part; 1000 + usize::from(part)]).collect();
        let mut upload = place.upload().unwrap();
        for part in &parts {
            upload.push(part.clone()).unwrap();
        }
        assert!(!place.exists().unwrap());
        upload.finish().unwrap();
        assert_eq!(place.read(1 << 20).unwrap(), parts.concat());
        let mut again = place.upload().unwrap();
        again.push("other").unwrap();
        drop(again);
        assert_eq!(place.read(1 << 20).unwrap(), parts.concat());
    }
}
