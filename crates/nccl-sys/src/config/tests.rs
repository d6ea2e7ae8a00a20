use std::mem::offset_of;

use super::*;

#[test]
fn the_layout_is_that_of_the_header() {
    let head = [offset_of!(Config, size), offset_of!(Config, magic), offset_of!(Config, version)];
    assert_eq!(head, [0, 8, 12]);
    let of_2_18 = [
        offset_of!(Config, blocking),
        offset_of!(Config, cga_cluster_size),
        offset_of!(Config, min_ctas),
        offset_of!(Config, max_ctas),
        offset_of!(Config, net_name),
        offset_of!(Config, split_share),
    ];
    assert_eq!(of_2_18, [16, 20, 24, 28, 32, 40]);
    let of_2_27 = [
        offset_of!(Config, traffic_class),
        offset_of!(Config, comm_name),
        offset_of!(Config, collnet_enable),
        offset_of!(Config, cta_policy),
        offset_of!(Config, shrink_share),
        offset_of!(Config, nvls_ctas),
    ];
    assert_eq!(of_2_27, [44, 48, 56, 60, 64, 68]);
    let newer = [
        offset_of!(Config, channels_per_net_peer),
        offset_of!(Config, nvlink_centric_sched),
        offset_of!(Config, graph_usage_mode),
        offset_of!(Config, rma_contexts),
        offset_of!(Config, max_p2p_peers),
    ];
    assert_eq!((newer, size_of::<Config>()), ([72, 76, 80, 84, 88], 96));
}

#[test]
fn a_new_one_carries_the_magic_number_and_leaves_everything_to_nccl() {
    let config = Config::new();
    assert_eq!((config.magic, config.version, config.size), (0xcafe_beef, 21800, 48));
    let numbers = [config.blocking, config.min_ctas, config.traffic_class, config.nvls_ctas, config.max_p2p_peers];
    assert_eq!(numbers, [c_int::MIN; 5]);
    assert!(config.net_name.is_null() && config.comm_name.is_null());
}

#[test]
fn each_setting_raises_size_and_version_as_far_as_it_needs() {
    let old = Config::new().blocking(false).cga_cluster_size(2).ctas(1, 4).net_name(c"IB").split_share(true);
    assert_eq!((old.version, old.size, old.blocking, old.split_share), (21800, 48, 0, 1));
    let steps = [
        (old.traffic_class(3), 22600, 48),
        (old.comm_name(c"a"), 22700, 72),
        (old.nvls_ctas(2), 22700, 72),
        (old.channels_per_net_peer(2), 22800, 80),
        (old.rma_contexts(1), 22900, 88),
        (old.max_p2p_peers(8), 23000, 96),
        (old.max_p2p_peers(8).comm_name(c"a"), 23000, 96),
    ];
    for (config, version, size) in steps {
        assert_eq!((config.version, config.size), (version, size));
    }
}
