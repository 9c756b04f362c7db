//! The structures here and those of the system's header, measured by the system's C compiler.

use std::fmt::Write as _;
use std::mem::{align_of, offset_of, size_of};
use std::process::Command;

use super::*;

/// Set where the header has to be there, so that its absence is a failure.
const REQUIRED: &str = "SHOAL_TEST_VERBS_HEADER";

/// C expressions and what they have to be.
fn expected() -> Vec<(String, usize)> {
    let mut all = Vec::new();
    macro_rules! offsets {
        ($($structure:ident { $($field:ident),* })*) => {
            $($(all.push((
                concat!("offsetof(struct ", stringify!($structure), ", ", stringify!($field), ")").to_owned(),
                offset_of!($structure, $field),
            ));)*)*
        };
    }
    macro_rules! sizes {
        ($($structure:ident)*) => {
            $(all.push((concat!("sizeof(struct ", stringify!($structure), ")").to_owned(), size_of::<$structure>()));)*
        };
    }
    macro_rules! constants {
        ($($constant:ident)*) => { $(all.push((stringify!($constant).to_owned(), $constant as usize));)* };
    }
    offsets! {
        ibv_context_ops { poll_cq, req_notify_cq, post_send, post_recv }
        ibv_context { device, ops }
        ibv_cq { context }
        ibv_comp_channel { context, fd }
        ibv_qp { context, qp_context, pd, send_cq, recv_cq, srq, handle, qp_num }
        ibv_mr { context, pd, addr, length, handle, lkey, rkey }
        ibv_sge { addr, length, lkey }
        ibv_send_wr { wr_id, next, sg_list, num_sge, opcode, send_flags, imm_data }
        ibv_recv_wr { wr_id, next, sg_list, num_sge }
        ibv_wc {
            wr_id, status, opcode, vendor_err, byte_len, imm_data, qp_num, src_qp, wc_flags, pkey_index, slid, sl,
            dlid_path_bits
        }
        ibv_qp_cap { max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_data }
        ibv_qp_init_attr { qp_context, send_cq, recv_cq, srq, cap, qp_type, sq_sig_all }
        ibv_ah_attr { dlid, sl, src_path_bits, static_rate, is_global, port_num }
        ibv_qp_attr {
            qp_state, cur_qp_state, path_mtu, path_mig_state, qkey, rq_psn, sq_psn, dest_qp_num, qp_access_flags, cap,
            ah_attr, alt_ah_attr, pkey_index, alt_pkey_index, en_sqd_async_notify, sq_draining, max_rd_atomic,
            max_dest_rd_atomic, min_rnr_timer, port_num, timeout, retry_cnt, rnr_retry, alt_port_num, alt_timeout,
            rate_limit
        }
        ibv_port_attr {
            state, max_mtu, active_mtu, gid_tbl_len, port_cap_flags, max_msg_sz, bad_pkey_cntr, qkey_viol_cntr,
            pkey_tbl_len, lid
        }
    }
    sizes! {
        ibv_context_ops ibv_sge ibv_send_wr ibv_recv_wr ibv_wc ibv_qp_cap ibv_qp_init_attr ibv_ah_attr ibv_qp_attr
    }
    constants! {
        IBV_PORT_DOWN IBV_PORT_ACTIVE IBV_QPT_RC IBV_QPT_UC IBV_QPS_INIT IBV_QPS_RTR IBV_QPS_RTS IBV_WR_SEND
        IBV_SEND_SIGNALED IBV_ACCESS_LOCAL_WRITE IBV_ACCESS_REMOTE_WRITE IBV_ACCESS_REMOTE_READ IBV_QP_STATE
        IBV_QP_ACCESS_FLAGS IBV_QP_PKEY_INDEX IBV_QP_PORT IBV_QP_AV IBV_QP_PATH_MTU IBV_QP_TIMEOUT IBV_QP_RETRY_CNT
        IBV_QP_RNR_RETRY IBV_QP_RQ_PSN IBV_QP_MAX_QP_RD_ATOMIC IBV_QP_MIN_RNR_TIMER IBV_QP_SQ_PSN
        IBV_QP_MAX_DEST_RD_ATOMIC IBV_QP_DEST_QPN
    }
    for (field, place) in [
        ("grh.dgid", offset_of!(ibv_ah_attr, dgid)),
        ("grh.flow_label", offset_of!(ibv_ah_attr, flow_label)),
        ("grh.sgid_index", offset_of!(ibv_ah_attr, sgid_index)),
        ("grh.hop_limit", offset_of!(ibv_ah_attr, hop_limit)),
        ("grh.traffic_class", offset_of!(ibv_ah_attr, traffic_class)),
    ] {
        all.push((format!("offsetof(struct ibv_ah_attr, {field})"), place));
    }
    all.push((
        "offsetof(struct ibv_send_wr, wr.rdma.remote_addr)".to_owned(),
        offset_of!(ibv_send_wr, remote_addr),
    ));
    all.push(("offsetof(struct ibv_send_wr, wr.rdma.rkey)".to_owned(), offset_of!(ibv_send_wr, rkey)));
    all.push(("sizeof(union ibv_gid)".to_owned(), size_of::<ibv_gid>()));
    all.push(("_Alignof(union ibv_gid)".to_owned(), align_of::<ibv_gid>()));
    // What the library may write must have room here.
    all.push((format!("sizeof(struct ibv_port_attr) <= {}", size_of::<ibv_port_attr>()), 1));
    all
}

#[test]
fn structures_lie_in_memory_as_the_systems_header_says() {
    let required = std::env::var_os(REQUIRED).is_some();
    let expected = expected();
    let mut source =
        "#include <infiniband/verbs.h>\n#include <stddef.h>\n#include <stdio.h>\nint main(void) {\n"
            .to_owned();
    for (expression, _) in &expected {
        writeln!(source, "    printf(\"%zu\\n\", (size_t)({expression}));").unwrap();
    }
    source.push_str("    return 0;\n}\n");
    let folder = std::env::temp_dir().join(format!("shoal-verbs-layout-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let (file, program) = (folder.join("layout.c"), folder.join("layout"));
    std::fs::write(&file, source).unwrap();
    let compiled = Command::new("cc").arg(&file).arg("-o").arg(&program).output();
    let said = match &compiled {
        Ok(output) if output.status.success() => None,
        Ok(output) => Some(String::from_utf8_lossy(&output.stderr).into_owned()),
        Err(error) => Some(error.to_string()),
    };
    if let Some(said) = said {
        std::fs::remove_dir_all(&folder).unwrap();
        assert!(!required && !said.contains("has no member"), "{said}");
        eprintln!("SKIPPED: infiniband/verbs.h is not installed here");
        return;
    }
    let output = Command::new(&program).output().unwrap();
    std::fs::remove_dir_all(&folder).unwrap();
    let measured = String::from_utf8(output.stdout).unwrap();
    let measured: Vec<usize> = measured.lines().map(|line| line.parse().unwrap()).collect();
    assert_eq!(measured.len(), expected.len());
    for ((expression, ours), theirs) in expected.iter().zip(measured) {
        assert_eq!(*ours, theirs, "{expression}");
    }
}
