/*
 * softrnic with a completion queue that can be made to lie: everything is softrnic's, but what a poll gives back goes
 * through a function of the program, if it has set one.
 */
#include <dlfcn.h>
#include <infiniband/verbs.h>
#include <stddef.h>

typedef int poll_function(struct ibv_cq *cq, int room, struct ibv_wc *completions);
typedef int script_function(poll_function *real, struct ibv_cq *cq, int room, struct ibv_wc *completions);

static poll_function *real_poll;
static script_function *script;

void provider_script(script_function *function);
struct ibv_context *provider_open_device(struct ibv_device *device);

void provider_script(script_function *function)
{
    script = function;
}

static int poll(struct ibv_cq *cq, int room, struct ibv_wc *completions)
{
    return script ? script(real_poll, cq, room, completions) : real_poll(cq, room, completions);
}

struct ibv_context *provider_open_device(struct ibv_device *device)
{
    typedef struct ibv_context *open_function(struct ibv_device *);
    open_function *open = (open_function *)dlvsym(RTLD_NEXT, "ibv_open_device", "IBVERBS_1.1");
    struct ibv_context *context = open ? open(device) : NULL;
    if (context) {
        real_poll = context->ops.poll_cq;
        context->ops.poll_cq = poll;
    }
    return context;
}
__asm__(".symver provider_open_device,ibv_open_device@@IBVERBS_1.1");
