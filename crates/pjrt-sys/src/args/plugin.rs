//! The plugin itself.

use crate::NamedValue;

arguments! {
    /// Arguments of `PJRT_Plugin_Initialize`.
    struct PluginInitializeArgs for PJRT_Plugin_Initialize {
    }

    /// Arguments of `PJRT_Plugin_Attributes`.
    struct PluginAttributesArgs for PJRT_Plugin_Attributes {
        output attributes: *const NamedValue,
        output num_attributes: usize,
    }
}
