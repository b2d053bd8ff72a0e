"""A complete third-party producer: routed experts in plain torch, one row for each route, grouped by expert."""

import torch

from moe_contract import UnfinalizedMoEOutput, apply_activation, finalize, producer


@producer(name="acme-moe", version="0.1", routing_methods={"renormalize"}, expert_biases=False, graph_capturable=False)
@torch.no_grad()
def acme_moe(layer, config, hidden_states, router_logits):
    """One rank's call: rows of its own experts, weights of all slots, and which row belongs to which slot."""
    tokens, top_k, experts = hidden_states.shape[0], layer.routing.top_k, layer.experts
    logits, ids = router_logits.float().topk(top_k)
    weights = logits.softmax(-1).to(hidden_states.dtype)
    local = (ids - layer.first_expert).flatten()
    routes = local.argsort(stable=True)
    routes = routes[(local[routes] >= 0) & (local[routes] < layer.num_local_experts)]
    index = torch.full_like(local, -1, dtype=torch.int32)
    index[routes] = torch.arange(len(routes), dtype=torch.int32, device=index.device)
    rows = hidden_states.new_empty(len(routes), layer.hidden_size)
    for expert in local[routes].unique().tolist():
        mine = local[routes] == expert
        x = hidden_states[routes[mine] // top_k].float()
        gate = None if experts.gate is None else x @ experts.gate[expert].float().T
        inner = apply_activation(layer.activation, gate, x @ experts.up[expert].float().T)
        rows[mine] = (inner @ experts.down[expert].float().T).to(rows.dtype)
    output = UnfinalizedMoEOutput(rows, weights, index.view(tokens, top_k))
    return output if config.should_defer(tokens) else finalize(output)
