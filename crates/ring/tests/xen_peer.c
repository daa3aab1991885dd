/*
 * One half of a netif ring, by the macros of Xen's own headers: the other side in
 * tests/xen_differential.rs, which writes one command a line to stdin and reads the
 * reply, one line.
 *
 *   xen_peer RING FILE   RING: tx, rx or ctrl; FILE: the ring's page
 *   xen_peer numbers     sizes and constants, one a line
 */
#include <fcntl.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* Without it, the headers ask for the barriers by their names of before Xen 3.2. */
#define __XEN_INTERFACE_VERSION__ 0x00040d00
#define xen_mb() __atomic_thread_fence(__ATOMIC_SEQ_CST)
#define xen_rmb() __atomic_thread_fence(__ATOMIC_ACQUIRE)
#define xen_wmb() __atomic_thread_fence(__ATOMIC_RELEASE)
#include <xen/xen.h>
#include <xen/grant_table.h>
#include <xen/io/netif.h>

#define PAGE 4096

static unsigned int n[8];
static char command[16];

static int next(void)
{
    char line[256];

    if (!fgets(line, sizeof(line), stdin))
        return 0;
    memset(n, 0, sizeof(n));
    return sscanf(line, "%15s %u %u %u %u %u %u %u %u", command, &n[0], &n[1], &n[2], &n[3], &n[4],
                  &n[5], &n[6], &n[7]) > 0;
}

static void fill_tx_req(struct netif_tx_request *r)
{
    r->gref = n[0];
    r->offset = n[1];
    r->flags = n[2];
    r->id = n[3];
    r->size = n[4];
}

static void print_tx_req(const struct netif_tx_request *r)
{
    printf("%u %u %u %u %u\n", r->gref, r->offset, r->flags, r->id, r->size);
}

static void fill_tx_rsp(struct netif_tx_response *r)
{
    r->id = n[0];
    r->status = n[1];
}

static void print_tx_rsp(const struct netif_tx_response *r)
{
    printf("%u %d\n", r->id, r->status);
}

static void fill_rx_req(struct netif_rx_request *r)
{
    r->id = n[0];
    r->pad = 0;
    r->gref = n[1];
}

static void print_rx_req(const struct netif_rx_request *r)
{
    printf("%u %u\n", r->id, r->gref);
}

static void fill_rx_rsp(struct netif_rx_response *r)
{
    r->id = n[0];
    r->offset = n[1];
    r->flags = n[2];
    r->status = n[3];
}

static void print_rx_rsp(const struct netif_rx_response *r)
{
    printf("%u %u %u %d\n", r->id, r->offset, r->flags, r->status);
}

static void fill_ctrl_req(struct xen_netif_ctrl_request *r)
{
    r->id = n[0];
    r->type = n[1];
    memcpy(r->data, &n[2], sizeof(r->data));
}

static void print_ctrl_req(const struct xen_netif_ctrl_request *r)
{
    printf("%u %u %u %u %u\n", r->id, r->type, r->data[0], r->data[1], r->data[2]);
}

static void fill_ctrl_rsp(struct xen_netif_ctrl_response *r)
{
    r->id = n[0];
    r->type = n[1];
    r->status = n[2];
    r->data = n[3];
}

static void print_ctrl_rsp(const struct xen_netif_ctrl_response *r)
{
    printf("%u %u %u %u\n", r->id, r->type, r->status, r->data);
}

/* An extra info over a slot: type, more, and three numbers that depend on the type. */
static void fill_extra(void *slot)
{
    struct netif_extra_info *e = slot;

    memset(e, 0, sizeof(*e));
    e->type = n[0];
    e->flags = n[1] ? XEN_NETIF_EXTRA_FLAG_MORE : 0;
    if (e->type == XEN_NETIF_EXTRA_TYPE_GSO) {
        e->u.gso.size = n[2];
        e->u.gso.type = n[3];
        e->u.gso.features = n[4];
    } else if (e->type == XEN_NETIF_EXTRA_TYPE_HASH) {
        e->u.hash.type = n[2];
        e->u.hash.algorithm = n[3];
        memcpy(e->u.hash.value, &n[4], 4);
    } else {
        memcpy(e->u.mcast.addr, &n[2], 4);
        memcpy(e->u.mcast.addr + 4, &n[3], 2);
    }
}

static void print_extra(const void *slot)
{
    const struct netif_extra_info *e = slot;
    uint32_t low = 0, high = 0;

    if (e->type == XEN_NETIF_EXTRA_TYPE_GSO) {
        printf("%u %u %u %u %u\n", e->type, e->flags, e->u.gso.size, e->u.gso.type,
               e->u.gso.features);
    } else if (e->type == XEN_NETIF_EXTRA_TYPE_HASH) {
        memcpy(&low, e->u.hash.value, 4);
        printf("%u %u %u %u %u\n", e->type, e->flags, e->u.hash.type, e->u.hash.algorithm, low);
    } else {
        memcpy(&low, e->u.mcast.addr, 4);
        memcpy(&high, e->u.mcast.addr + 4, 2);
        printf("%u %u %u %u 0\n", e->type, e->flags, low, high);
    }
}

/* The commands, for one kind of ring. */
#define SERVE(ring, kind)                                                                          \
    static void serve_##kind(void *page)                                                           \
    {                                                                                              \
        ring##_sring_t *s = page;                                                                  \
        ring##_front_ring_t f;                                                                     \
        ring##_back_ring_t b;                                                                      \
        union ring##_sring_entry copy;                                                             \
        int flag;                                                                                  \
                                                                                                   \
        memset(&f, 0, sizeof(f));                                                                  \
        memset(&b, 0, sizeof(b));                                                                  \
        while (next()) {                                                                           \
            flag = 0;                                                                              \
            if (!strcmp(command, "init")) {                                                        \
                SHARED_RING_INIT(s);                                                               \
                s->req_prod = s->rsp_prod = n[0];                                                  \
                s->req_event = s->rsp_event = n[0] + 1;                                            \
                FRONT_RING_ATTACH(&f, s, n[0], PAGE);                                              \
                printf("%u\n", RING_SIZE(&f));                                                     \
            } else if (!strcmp(command, "attach")) {                                               \
                BACK_RING_ATTACH(&b, s, s->rsp_prod, PAGE);                                        \
                printf("%u\n", RING_SIZE(&b));                                                     \
            } else if (!strcmp(command, "free")) {                                                 \
                printf("%u\n", RING_FREE_REQUESTS(&f));                                            \
            } else if (!strcmp(command, "req")) {                                                  \
                fill_##kind##_req(RING_GET_REQUEST(&f, f.req_prod_pvt++));                         \
                printf("0\n");                                                                     \
            } else if (!strcmp(command, "reqx")) {                                                 \
                fill_extra(RING_GET_REQUEST(&f, f.req_prod_pvt++));                                \
                printf("0\n");                                                                     \
            } else if (!strcmp(command, "rsp")) {                                                  \
                fill_##kind##_rsp(RING_GET_RESPONSE(&b, b.rsp_prod_pvt++));                        \
                printf("0\n");                                                                     \
            } else if (!strcmp(command, "rspx")) {                                                 \
                fill_extra(RING_GET_RESPONSE(&b, b.rsp_prod_pvt++));                               \
                printf("0\n");                                                                     \
            } else if (!strcmp(command, "pushreq")) {                                              \
                RING_PUSH_REQUESTS_AND_CHECK_NOTIFY(&f, flag);                                     \
                printf("%d\n", !!flag);                                                            \
            } else if (!strcmp(command, "pushrsp")) {                                              \
                RING_PUSH_RESPONSES_AND_CHECK_NOTIFY(&b, flag);                                    \
                printf("%d\n", !!flag);                                                            \
            } else if (!strcmp(command, "finalreq")) {                                             \
                RING_FINAL_CHECK_FOR_REQUESTS(&b, flag);                                           \
                printf("%d\n", !!flag);                                                            \
            } else if (!strcmp(command, "finalrsp")) {                                             \
                RING_FINAL_CHECK_FOR_RESPONSES(&f, flag);                                          \
                printf("%d\n", !!flag);                                                            \
            } else if (!strcmp(command, "reqs")) {                                                 \
                printf("%u\n", XEN_RING_NR_UNCONSUMED_REQUESTS(&b));                               \
            } else if (!strcmp(command, "rsps")) {                                                 \
                printf("%u\n", XEN_RING_NR_UNCONSUMED_RESPONSES(&f));                              \
            } else if (!strcmp(command, "getreq")) {                                               \
                RING_COPY_REQUEST(&b, b.req_cons++, &copy.req);                                    \
                print_##kind##_req(&copy.req);                                                     \
            } else if (!strcmp(command, "getreqx")) {                                              \
                print_extra(RING_GET_REQUEST(&b, b.req_cons++));                                   \
            } else if (!strcmp(command, "getrsp")) {                                               \
                RING_COPY_RESPONSE(&f, f.rsp_cons++, &copy.rsp);                                   \
                print_##kind##_rsp(&copy.rsp);                                                     \
            } else if (!strcmp(command, "getrspx")) {                                              \
                print_extra(RING_GET_RESPONSE(&f, f.rsp_cons++));                                  \
            } else {                                                                               \
                printf("unknown command %s\n", command);                                           \
            }                                                                                      \
            fflush(stdout);                                                                        \
        }                                                                                          \
    }

SERVE(netif_tx, tx)
SERVE(netif_rx, rx)
SERVE(xen_netif_ctrl, ctrl)

#define NUMBER(what) printf(#what " %ld\n", (long)(what))

static void numbers(void)
{
    NUMBER(sizeof(union netif_tx_sring_entry));
    NUMBER(sizeof(union netif_rx_sring_entry));
    NUMBER(sizeof(union xen_netif_ctrl_sring_entry));
    NUMBER(sizeof(struct xen_netif_gref));
    NUMBER(offsetof(struct netif_rx_sring, pvt.netif.smartpoll_active));
    NUMBER(offsetof(struct netif_tx_sring, ring));
    NUMBER(NETTXF_csum_blank);
    NUMBER(NETTXF_data_validated);
    NUMBER(NETTXF_more_data);
    NUMBER(NETTXF_extra_info);
    NUMBER(NETRXF_data_validated);
    NUMBER(NETRXF_csum_blank);
    NUMBER(NETRXF_more_data);
    NUMBER(NETRXF_extra_info);
    NUMBER(NETRXF_gso_prefix);
    NUMBER(NETIF_RSP_OKAY);
    NUMBER(NETIF_RSP_ERROR);
    NUMBER(NETIF_RSP_DROPPED);
    NUMBER(NETIF_RSP_NULL);
    NUMBER(XEN_NETIF_GSO_TYPE_TCPV4);
    NUMBER(XEN_NETIF_GSO_TYPE_TCPV6);
    NUMBER(XEN_NETIF_NR_SLOTS_MIN);
    NUMBER(XEN_NETIF_CTRL_TYPE_GET_HASH_FLAGS);
    NUMBER(XEN_NETIF_CTRL_TYPE_SET_HASH_FLAGS);
    NUMBER(XEN_NETIF_CTRL_TYPE_SET_HASH_KEY);
    NUMBER(XEN_NETIF_CTRL_TYPE_GET_HASH_MAPPING_SIZE);
    NUMBER(XEN_NETIF_CTRL_TYPE_SET_HASH_MAPPING_SIZE);
    NUMBER(XEN_NETIF_CTRL_TYPE_SET_HASH_MAPPING);
    NUMBER(XEN_NETIF_CTRL_TYPE_SET_HASH_ALGORITHM);
    NUMBER(XEN_NETIF_CTRL_TYPE_GET_GREF_MAPPING_SIZE);
    NUMBER(XEN_NETIF_CTRL_TYPE_ADD_GREF_MAPPING);
    NUMBER(XEN_NETIF_CTRL_TYPE_DEL_GREF_MAPPING);
    NUMBER(XEN_NETIF_CTRL_STATUS_SUCCESS);
    NUMBER(XEN_NETIF_CTRL_STATUS_NOT_SUPPORTED);
    NUMBER(XEN_NETIF_CTRL_STATUS_INVALID_PARAMETER);
    NUMBER(XEN_NETIF_CTRL_STATUS_BUFFER_OVERFLOW);
}

int main(int argc, char **argv)
{
    void *page;
    int fd;

    if (argc == 2 && !strcmp(argv[1], "numbers")) {
        numbers();
        return 0;
    }
    if (argc != 3)
        return 2;
    fd = open(argv[2], O_RDWR);
    page = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (fd < 0 || page == MAP_FAILED) {
        perror(argv[2]);
        return 1;
    }
    if (!strcmp(argv[1], "tx"))
        serve_tx(page);
    else if (!strcmp(argv[1], "rx"))
        serve_rx(page);
    else if (!strcmp(argv[1], "ctrl"))
        serve_ctrl(page);
    else
        return 2;
    return 0;
}
