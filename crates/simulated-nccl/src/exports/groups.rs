//! Groups.
#![expect(unsafe_code, reason = "functions of C, under the names of C")]

use nccl_sys::{Code, SimInfo};

use super::{DONE, enter, exports};
use crate::group;

exports! {
    fn ncclGroupStart() {
        group::start();
        DONE
    }

    fn ncclGroupEnd() {
        group::end()
    }

    fn ncclGroupSimulateEnd(info: *mut SimInfo) {
        let operations = group::discard()?;
        if !info.is_null() {
            // SAFETY: the caller has passed such a structure; one microsecond per operation is an arbitrary estimate.
            unsafe { (*info).estimated_time = operations as f32 };
        }
        DONE
    }
}
