use distribute_testkit::replay;
#[cfg(feature = "grpc")]
use prost::Message as _;

use super::*;

fn texts(all: &[&str]) -> Vec<Vec<u8>> {
    all.iter().map(|text| text.as_bytes().to_vec()).collect()
}

#[test]
fn replay_tf_config() {
    let messages = texts(&[
        r#"{"cluster": {"worker": ["a:2222", "b:2222"]}, "task": {"type": "worker", "index": 1}}"#,
        r#"{"cluster": {"chief": ["[::1]:1"], "ps": ["p:1"]}, "task": {"type": "chief", "index": "0"}}"#,
        r#"{"sparseCluster": {"worker": {"3": "w:1"}, "ps": ["p:1"]}, "task": {"type": "worker", "index": 3}}"#,
        r#"{"cluster": {}, "task": {"type": "evaluator", "index": 0}, "environment": "cloud", "rpc_layer": "grpc"}"#,
        r#"{"cluster": {"worker": ["a:1"]}, "session_master": "x"}"#,
        "",
    ]);
    replay("tf_config", tf_config, &messages, 3000);
}

#[test]
fn replay_host_list() {
    let messages = texts(&["n[1-3,7],m05", "node1", "n[08-10]x[0-2]", "a,b,c", "2(x3),1", "4", "r[0-9]n[00-31]"]);
    replay("host_list", host_list, &messages, 3000);
}

#[test]
fn replay_task_names() {
    let messages = texts(&["worker:3", "master:0", "a:1", "[fe80::1%eth0]:22", "10.0.0.1:65535"]);
    replay("task_names", task_names, &messages, 3000);
}

#[test]
fn replay_launcher_variables() {
    let messages = texts(&[
        "TF_CONFIG={\"cluster\": {\"worker\": [\"a:1\", \"b:1\"]}, \"task\": {\"type\": \"worker\", \"index\": 0}}",
        "RANK=1\nWORLD_SIZE=2\nMASTER_ADDR=a\nMASTER_PORT=29500\nLOCAL_RANK=1\nLOCAL_WORLD_SIZE=2",
        "PET_NODE_RANK=1\nPET_NNODES=2\nPET_MASTER_ADDR=a\nPET_MASTER_PORT=29500\nPET_NPROC_PER_NODE=auto",
        "JAX_PROCESS_ID=0\nJAX_NUM_PROCESSES=2\nJAX_COORDINATOR_ADDRESS=a:1",
        "HOROVOD_RANK=0\nHOROVOD_SIZE=2\nHOROVOD_LOCAL_SIZE=2\nHOROVOD_GLOO_RENDEZVOUS_PORT=1",
        "OMPI_COMM_WORLD_RANK=0\nOMPI_COMM_WORLD_SIZE=2\nOMPI_COMM_WORLD_LOCAL_SIZE=2\nPMIX_NAMESPACE=x",
        "SLURM_PROCID=3\nSLURM_NTASKS=4\nSLURM_STEP_NODELIST=n[1-2]\nSLURM_STEP_TASKS_PER_NODE=2(x2)\nSLURM_JOB_ID=7\n\
         SLURM_STEP_ID=0\nSLURM_NODEID=1\nSLURM_LOCALID=1",
        "SLURM_PROCID=0\nSLURM_STEP_NUM_TASKS=2\nSLURM_STEP_NODELIST=a,b\nSLURM_STEP_TASKS_PER_NODE=1(x2)\n\
         SLURM_HET_SIZE=2\nSLURM_JOB_NODELIST_HET_GROUP_0=b\nSLURM_JOB_NODELIST_HET_GROUP_1=a\nSLURM_NODEID=0\n\
         SLURMD_NODENAME=b",
        "SM_HOSTS=[\"algo-1\", \"algo-2\"]\nSM_CURRENT_HOST=algo-2\nDISTRIBUTE_PORT=7777",
        "CONFIG={\"current_host\": \"algo-1\", \"hosts\": [\"algo-1\", \"algo-2\"]}\nDISTRIBUTE_JOB_ID=j",
        "CLUSTER_SPEC={\"cluster\": {\"workerpool0\": [\"a:1\"], \"workerpool1\": [\"b:1\"]}, \"task\": {\"type\": \
         \"workerpool0\", \"index\": 0}}\nDISTRIBUTE_JOB_ID=j",
    ]);
    replay("launcher_variables", launcher_variables, &messages, 3000);
}

#[test]
fn replay_handshake() {
    let secret = crate::JobSecret::new([7; 32]).unwrap();
    let terms = |identity| crate::secret::Terms::new("fuzz 1", identity);
    let call = |identity| crate::secret::Calling::new(&secret, &terms(identity), b"rank 0").unwrap().1;
    let cut = |flags: u8, bytes: &[u8], size: usize| {
        let pieces = bytes.chunks(size).flat_map(|piece| [&[piece.len() as u8], piece].concat());
        [flags].into_iter().chain(pieces).collect::<Vec<u8>>()
    };
    let proof = [&b"dst-sec1\x03\0\x20"[..], &[9; 32]].concat();
    let challenge = [&b"dst-sec1\x02\0\x20"[..], &[9; 32]].concat();
    let messages = [cut(2, &[call("job a"), proof].concat(), 200), cut(2, &call("job a"), 3), cut(0, &challenge, 11)];
    replay("handshake", handshake, &messages, 2000);
    let refused = [cut(1, &call("job a"), 200), cut(2, &call("job b"), 5), cut(0, b"dst-sec1\x04\0\x04\x04job", 15)];
    refused.iter().for_each(|bytes| assert!(!handshake(bytes)));
}

#[test]
fn replay_handshake_between() {
    let messages = [&b""[..], &[1, 1], &[1, 7, 1, 9], &[1, 200]].map(<[u8]>::to_vec);
    replay("handshake_between", handshake_between, &messages, 2000);
    assert!(!handshake_between(&[4, 0, 60, 1, 1]));
    assert!(!handshake_between(&[0, 4, 0, 60, 1, 1]));
}

#[test]
#[cfg(feature = "coordination")]
fn replay_coordination() {
    let messages = crate::coordination::fuzz::samples();
    replay("coordination", coordination, &messages.0, 1000);
    replay("coordination_leader", coordination_leader, &messages.1, 1000);
}

#[test]
#[cfg(feature = "coordination")]
fn replay_elastic() {
    replay("elastic", elastic, &crate::elastic::fuzz::samples(), 1000);
    replay("elastic_register", elastic_register, &crate::elastic::fuzz::register_samples(), 2000);
}

#[test]
#[cfg(feature = "grpc")]
fn replay_grpc_pieces() {
    use crate::grpc::fuzz::Sample;
    let sample = |len: usize| {
        let inner = vec![Sample { number: 1, ..Sample::default() }];
        Sample { number: 7, name: "name".to_owned(), inner, payload: vec![5; len].into() }
    };
    let framed = |len: usize| {
        let bytes = sample(len).encode_to_vec();
        [&[0][..], &(bytes.len() as u32).to_be_bytes(), &bytes].concat()
    };
    let messages = [[vec![1], framed(3)].concat(), [vec![3], framed(300), framed(0), framed(9000)].concat()];
    replay("grpc_pieces", grpc_pieces, &messages, 2000);
}

#[test]
#[cfg(all(feature = "gce", feature = "tpu"))]
fn replay_cloud_answers() {
    let messages = texts(&[
        r#"{"items": [{"instance": "https://a/z/instances/w-0", "status": "RUNNING"}], "nextPageToken": "t"}"#,
        r#"{"status": "RUNNING", "networkInterfaces": [{"networkIP": "10.0.0.1"}]}"#,
        r#"{"status": "RUNNING", "networkInterfaces": [{"ipv6Address": "fd00::1"}]}"#,
        "\u{1}\u{3}\0\u{2}30{\"error\": {\"code\": 403, \"message\": \"no\"}}",
        "\u{1}\u{3}\0\u{1d}Sun, 06 Nov 1994 08:49:37 GMTno quota",
        "\u{2}{\"acceleratorType\": \"v4-32\", \"state\": \"READY\", \"networkEndpoints\": [{\"ipAddress\": \
         \"10.0.0.2\", \"port\": 8470}], \"symptoms\": [{\"createTime\": \"2023-11-14T22:13:00Z\", \"symptomType\": \
         \"OUT_OF_MEMORY\"}]}",
        "\u{2}{\"acceleratorConfig\": {\"type\": \"V4\", \"topology\": \"2x2x4\"}, \"ipAddress\": \"a\", \"port\": \
         \"1\"}",
        "\u{3}TPU_WORKER_HOSTNAMES: 'a,b'\nTPU_WORKER_ID: '1'\nTPU_ACCELERATOR_TYPE: 'v5litepod-8'\n\
         TPU_HOST_BOUNDS: '2,1,1'\nTPU_CHIPS_PER_HOST_BOUNDS: '2,2,1'",
        "\u{3}TPU_PROCESS_ADDRESSES: a:1,a:2\nCLOUD_TPU_TASK_ID: 0\nMEGASCALE_NUM_SLICES: 2\nMEGASCALE_SLICE_ID: 1\n\
         MEGASCALE_COORDINATOR_ADDRESS: c:9",
        "\u{3}KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS: grpc://a:1,grpc://b",
    ]);
    let messages: Vec<Vec<u8>> =
        messages.into_iter().map(|bytes| if bytes[0] == b'{' { [vec![0], bytes].concat() } else { bytes }).collect();
    replay("cloud_answers", cloud_answers, &messages, 2000);
}

#[test]
#[cfg(feature = "kubernetes")]
fn replay_kubernetes_answers() {
    let pod = |name: &str, status: &str| format!(r#"{{"metadata": {{"name": "{name}"}}, "status": {status}}}"#);
    let running = r#"{"phase": "Running", "podIP": "10.0.0.1", "hostIP": "fd00::1", "containerStatuses": []}"#;
    let waiting = r#"{"phase": "Pending", "containerStatuses": [{"name": "main", "image": "i", "imageID": "", "ready":
        false, "restartCount": 0, "state": {"waiting": {"reason": "ImagePullBackOff", "message": "no\nimage"}}}]}"#;
    let pods = [pod("train-2", running), pod("train-10", running), pod("train-1", waiting)].join(",");
    let messages = [
        format!(r#"{{"metadata": {{"resourceVersion": "7", "continue": "c"}}, "items": [{pods}]}}"#).into_bytes(),
        format!(r#"{{"items": [{}]}}"#, pod("a", running)).into_bytes(),
    ];
    replay("kubernetes_answers", kubernetes_answers, &messages, 1000);
}
