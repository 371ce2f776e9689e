/* Loads and unloads the library twenty times with a parked request in between, then uses it in a forked child.
 * argv[1] is the library. Prints what survives: threads, descriptors, mappings of the library. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <infiniband/verbs.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static int entries(const char *path)
{
    int n = 0;
    DIR *d = opendir(path);
    while (d && readdir(d))
        n++;
    if (d)
        closedir(d);
    return n;
}

static int mapped(const char *what)
{
    char line[512];
    int n = 0;
    FILE *f = fopen("/proc/self/maps", "r");
    while (fgets(line, sizeof line, f))
        n += strstr(line, what) != NULL;
    fclose(f);
    return n;
}

#define SYM(ret, name, ...) ret (*name)(__VA_ARGS__) = (ret (*)(__VA_ARGS__))dlvsym(lib, "ibv_" #name, "IBVERBS_1.1")

static void use(const char *path, int unload)
{
    void *lib = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!lib)
        exit(2);
    SYM(struct ibv_device **, get_device_list, int *);
    SYM(void, free_device_list, struct ibv_device **);
    SYM(struct ibv_context *, open_device, struct ibv_device *);
    SYM(struct ibv_pd *, alloc_pd, struct ibv_context *);
    SYM(struct ibv_cq *, create_cq, struct ibv_context *, int, void *, void *, int);
    SYM(struct ibv_qp *, create_qp, struct ibv_pd *, struct ibv_qp_init_attr *);
    SYM(int, modify_qp, struct ibv_qp *, struct ibv_qp_attr *, int);
    SYM(int, query_gid, struct ibv_context *, uint8_t, int, union ibv_gid *);
    SYM(int, destroy_qp, struct ibv_qp *);
    SYM(int, destroy_cq, struct ibv_cq *);
    SYM(int, dealloc_pd, struct ibv_pd *);
    SYM(int, close_device, struct ibv_context *);
    struct ibv_device **list = get_device_list(NULL);
    struct ibv_context *ctx = open_device(list[0]);
    free_device_list(list);
    struct ibv_pd *pd = alloc_pd(ctx);
    struct ibv_cq *cq = create_cq(ctx, 16, NULL, NULL, 0);
    struct ibv_qp_init_attr init = {.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC, .cap = {4, 4, 1, 1, 0}};
    struct ibv_qp *qp = create_qp(pd, &init);
    struct ibv_qp_attr a = {.qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = 14};
    if (!qp || modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS))
        exit(3);
    a.qp_state = IBV_QPS_RTR;
    a.path_mtu = 5;
    a.dest_qp_num = qp->qp_num;
    a.ah_attr.is_global = a.ah_attr.port_num = 1;
    query_gid(ctx, 1, 0, &a.ah_attr.grh.dgid);
    if (modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                              IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER))
        exit(4);
    a.qp_state = IBV_QPS_RTS;
    a.rnr_retry = 7;
    a.timeout = 14;
    if (modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
                              IBV_QP_MAX_QP_RD_ATOMIC))
        exit(5);
    struct ibv_send_wr wr = {.opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED}, *bad;
    struct ibv_wc wc;
    if (ibv_post_send(qp, &wr, &bad) || ibv_poll_cq(cq, 1, &wc))
        exit(6);
    struct ibv_recv_wr r = {.wr_id = 9}, *bad_r;
    if (ibv_post_recv(qp, &r, &bad_r))
        exit(7);
    for (int seen = 0; seen < 2;)
        seen += ibv_poll_cq(cq, 1, &wc);
    if (unload && (destroy_qp(qp) || destroy_cq(cq) || dealloc_pd(pd) || close_device(ctx) || dlclose(lib)))
        exit(8);
}

int main(int argc, char **argv)
{
    int fds = entries("/proc/self/fd"), status;
    for (int i = 0; i < 20; i++)
        use(argv[argc - 1], 1);
    printf("threads %d fds %d mappings %d\n", entries("/proc/self/task") - 2, entries("/proc/self/fd") - fds,
           mapped("memfd:softrnic") + mapped("/dev/shm/softrnic"));
    fflush(stdout);
    use(argv[argc - 1], 0);
    pid_t child = fork();
    if (!child) {
        /* The parent's objects are inherited, open and parked; the child starts its own. */
        use(argv[argc - 1], 1);
        exit(0);
    }
    waitpid(child, &status, 0);
    printf("child %d\n", status);
    use(argv[argc - 1], 1);
    return 0;
}
