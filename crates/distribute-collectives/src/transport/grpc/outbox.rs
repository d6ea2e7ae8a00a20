//! Messages to a peer: data in a bounded queue, and control messages that overtake them.

use std::convert::Infallible;
use std::io::IoSlice;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};

use bytes::Bytes;
use distribute_cluster::grpc::encode;
use tokio::sync::mpsc;
use tonic::body::Body;

use super::frames::{self, Frame, Unsent, control};
use super::wire::{Abort, Hello, Here, Left, frame::Kind};
use super::{Bell, FRAME_BYTES, QUEUED_FRAMES, lock};

/// The sending half of a stream. It ends, once everything is sent, when this is dropped.
pub(super) struct Outbox {
    /// Frames of data.
    data: mpsc::Sender<Frame>,
    unsent: Arc<Unsent>,
    notices: Arc<Mutex<Notices>>,
}

/// Control messages that have not been sent. They have a place outside the queue of data, which is full as long as the
/// peer does not read.
#[derive(Default)]
struct Notices {
    /// That this member does not give its call up any more.
    here: Option<Here>,
    /// The last call in which this member waits; earlier ones are of no use any more.
    waiting: Option<u64>,
    /// How this member ended. The first end counts.
    end: Option<Kind>,
    /// The task that sends, if it waits.
    sender: Option<Waker>,
}

impl Outbox {
    /// Creates the two ends of a stream that begins with a hello. The body rings when there is room again.
    pub(super) fn new(hello: Hello, bell: &Arc<Bell>) -> (Outbox, Body) {
        let (data, queue) = mpsc::channel(QUEUED_FRAMES);
        let notices: Arc<Mutex<Notices>> = Arc::default();
        let (hello, bell) = (Some(control(Kind::Hello(hello))), bell.clone());
        let unsent = Unsent::new(&bell);
        let frames = Frames { hello, queue, notices: notices.clone(), payload: Bytes::new(), bell };
        (Outbox { data, unsent, notices }, Body::new(frames))
    }

    /// Queues a frame of what there is, if there is room; returns whether it has.
    pub(super) fn send(&self, parts: &mut Vec<IoSlice<'_>>) -> bool {
        let len = parts.iter().map(|part| part.len()).sum::<usize>().min(FRAME_BYTES);
        match self.data.try_reserve() {
            Ok(place) if !parts.is_empty() => {
                place.send(frames::data(parts, len, &self.unsent));
                true
            }
            _ => false,
        }
    }

    /// Returns the number of frames of data that no socket has taken.
    pub(super) fn unsent(&self) -> usize {
        self.unsent.count()
    }

    /// Returns whether the stream takes no frames any more.
    pub(super) fn is_closed(&self) -> bool {
        self.data.is_closed()
    }

    /// Tells the peer, which this member has called, that it is a member from now on.
    pub(super) fn here(&self) {
        self.notify(|notices| notices.here = Some(Here {}));
    }

    /// Tells the peer that this member waits in a call.
    pub(super) fn announce(&self, sequence: u64) {
        self.notify(|notices| notices.waiting = Some(sequence));
    }

    /// Tells the peer that this member leaves.
    pub(super) fn leave(&self) {
        self.end(Kind::Left(Left {}));
    }

    /// Tells the peer that the group has failed.
    pub(super) fn abort(&self, abort: Abort) {
        self.end(Kind::Abort(abort));
    }

    fn end(&self, kind: Kind) {
        self.notify(|notices| {
            let _ = notices.end.get_or_insert(kind);
        });
    }

    /// Returns whether nothing waits to be sent, or nothing will be.
    pub(super) fn is_done(&self) -> bool {
        self.is_closed() || (self.unsent() == 0 && lock(&self.notices).is_empty())
    }

    fn notify(&self, change: impl FnOnce(&mut Notices)) {
        let sender = {
            let mut notices = lock(&self.notices);
            change(&mut notices);
            notices.sender.take()
        };
        if let Some(sender) = sender {
            sender.wake();
        }
    }
}

impl Notices {
    fn is_empty(&self) -> bool {
        self.here.is_none() && self.waiting.is_none() && self.end.is_none()
    }

    /// Takes the next message. If there is none, the task is woken by the next.
    fn take(&mut self, context: &Context<'_>) -> Option<Frame> {
        let here = self.here.take().map(Kind::Here);
        let next = here.or_else(|| self.waiting.take().map(Kind::Waiting)).or_else(|| self.end.take());
        if next.is_none() {
            self.sender = Some(context.waker().clone());
        }
        next.map(control)
    }
}

/// The body of a stream of frames.
struct Frames {
    /// The first frame.
    hello: Option<Frame>,
    queue: mpsc::Receiver<Frame>,
    notices: Arc<Mutex<Notices>>,
    /// The payload of the frame whose beginning is sent.
    payload: Bytes,
    bell: Arc<Bell>,
}

impl Frames {
    /// Returns the next frame: control messages before data.
    fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<Frame>> {
        let first = self.hello.take().or_else(|| lock(&self.notices).take(context));
        if first.is_some() {
            return Poll::Ready(first);
        }
        match self.queue.poll_recv(context) {
            // A control message may have been put before the queue ended, and after it was looked for.
            Poll::Ready(None) => Poll::Ready(lock(&self.notices).take(context)),
            data => data,
        }
    }
}

impl http_body::Body for Frames {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<http_body::Frame<Bytes>, Infallible>>> {
        if !self.payload.is_empty() {
            let payload = std::mem::take(&mut self.payload);
            return Poll::Ready(Some(Ok(http_body::Frame::data(payload))));
        }
        self.poll_next(context).map(|next| {
            let frame = next?;
            self.bell.ring();
            let [head, payload] = encode(frame);
            self.payload = payload;
            Some(Ok(http_body::Frame::data(head)))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns what is there to be sent, with `None` for the end of the stream.
    fn kinds(frames: &mut Frames) -> Vec<Option<Kind>> {
        let mut context = Context::from_waker(Waker::noop());
        let mut kinds = Vec::new();
        while kinds.last() != Some(&None)
            && let Poll::Ready(next) = frames.poll_next(&mut context)
        {
            kinds.push(next.and_then(|frame| frame.kind));
        }
        kinds
    }

    fn ends() -> (Outbox, Frames) {
        let (data, queue) = mpsc::channel(QUEUED_FRAMES);
        let notices: Arc<Mutex<Notices>> = Arc::default();
        let hello = Some(control(Kind::Hello(Hello::default())));
        let frames = Frames { hello, queue, notices: notices.clone(), payload: Bytes::new(), bell: Arc::default() };
        (Outbox { data, unsent: Unsent::new(&Arc::default()), notices }, frames)
    }

    #[test]
    fn control_messages_overtake_data_but_not_the_hello() {
        let (outbox, mut frames) = ends();
        assert!(outbox.is_done());
        let data = || Kind::Data(Bytes::from_static(b"data"));
        while outbox.send(&mut vec![IoSlice::new(b"data")]) {}
        assert!(!outbox.send(&mut Vec::new()) && outbox.unsent() == QUEUED_FRAMES);
        outbox.announce(6);
        outbox.announce(7);
        outbox.here();
        let abort = Abort { cause: "as planned".to_owned(), ..Abort::default() };
        outbox.abort(abort.clone());
        outbox.leave();
        assert!(!outbox.is_done());
        let control = [Kind::Hello(Hello::default()), Kind::Here(Here {}), Kind::Waiting(7), Kind::Abort(abort)];
        let expected = control.into_iter().chain((0..QUEUED_FRAMES).map(|_| data())).map(Some);
        assert_eq!(kinds(&mut frames), expected.collect::<Vec<_>>());
        assert!(outbox.is_done());
        outbox.announce(8);
        assert!(!outbox.is_done());
        drop(outbox);
        assert_eq!(kinds(&mut frames), [Some(Kind::Waiting(8)), None]);
    }
}
