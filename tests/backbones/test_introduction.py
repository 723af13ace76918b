"""An Introduction to Transformers (Turner, 2024) in its notation, compared with our block in float64.

X is D x N: a token is a column. Two differences between the paper and this file matter.

Queries and keys: Eq. 5 normalizes over n'', the index of the query, so that the columns of A sum to 1, as in Eq. 1,
Y = X A. The attending token is therefore n', the second index, which the paper calls the key's; it averages the tokens
n, the query's. The usual names are the opposite: our query weights are U_k and our key weights U_q. Section 4.1's mask,
A_{n,n'} = 0 where n > n', has the same order. The two formulas without a number before Eq. 3 normalize over one index
and over the other.

LayerNorm: section 2.3 prints it with mean and variance over n for each d, and says that it "acts on each feature
dimension independently". The cited one (Ba et al., 2016), which figure 5 means, is over the features d of each token n,
like ours. With the printed one, a token would depend on later ones despite the mask.
"""

import math

import pytest
import torch
from torch import nn

import graticule
from graticule.layers.attention import Attention, CausalAttention
from graticule.layers.block import Block
from in_turn import in_turn

D, N = 12, 7
NUMBER = torch.float64


def naive_attention_matrix(X, U_q, U_k, causal=False):
    """Compute Eq. 5-6 by element: [A]_{n,n'}, N x N, whose columns sum to 1; the scale is absorbed in the U."""
    tokens = X.shape[1]
    A = torch.zeros(tokens, tokens, dtype=NUMBER)
    for n_ in range(tokens):
        seen = [n for n in range(tokens) if n <= n_ or not causal]
        exponent = {n: float((U_q @ X[:, n]) @ (U_k @ X[:, n_])) for n in seen}
        total = sum(math.exp(value) for value in exponent.values())
        for n in seen:
            A[n, n_] = math.exp(exponent[n]) / total
    return A


def naive_mhsa(X, U_q, U_k, V, causal=False):
    """Compute Eq. 4: Y = sum_h V_h X A_h."""
    return sum(V_h @ X @ naive_attention_matrix(X, q, k, causal) for q, k, V_h in zip(U_q, U_k, V, strict=True))


def naive_layer_norm(X, gamma, beta, eps):
    """Compute LayerNorm over the features d of each token n, as the text means it."""
    Y = torch.empty_like(X)
    for n in range(X.shape[1]):
        mean = sum(X[:, n]) / len(X)
        variance = sum((X[:, n] - mean) ** 2) / len(X)
        Y[:, n] = gamma * (X[:, n] - mean) / math.sqrt(variance + eps) + beta
    return Y


def naive_mlp(X, layers):
    """Apply the same MLP of one hidden layer at every location n (section 2.2), with GELU between."""
    (W_1, b_1), (W_2, b_2) = layers
    columns = []
    for n in range(X.shape[1]):
        hidden = W_1 @ X[:, n] + b_1
        hidden = hidden * 0.5 * (1 + torch.erf(hidden / math.sqrt(2)))
        columns.append(W_2 @ hidden + b_2)
    return torch.stack(columns, 1)


def matrices(attention):
    """Return the paper's U_q, U_k, V, K x D, K x D and D x D per head, of our weights; V_h = U_h U_{v,h} (note 12)."""
    ours_q, ours_k, values = (
        part.unflatten(0, (attention.num_heads, attention.head_dim)) for part in attention.qkv.weight.chunk(3)
    )
    out = attention.proj.weight.unflatten(1, (attention.num_heads, attention.head_dim)).transpose(0, 1)  # (H, D, K)
    return list(ours_k), list(ours_q * attention.scale), list(out @ values)


def drawn(module):
    """Return the module in float64 with all parameters drawn, without biases in attention, as in the paper."""
    module = module.double().eval().requires_grad_(False)
    for name, parameter in module.named_parameters():
        nn.init.normal_(parameter, std=0.5)
        if name.endswith(("proj.bias", "qkv.bias")):
            nn.init.zeros_(parameter)
    return module


def ours(module, X):
    """Apply one of our modules, whose tokens are rows, to columns."""
    with torch.no_grad():
        return module(X.T[None])[0].T


def vit(**options):
    """Return a small ViT for images of 8 x 12 pixels, with 2 x 3 patches."""
    size = {"img_size": (8, 12), "patch_size": 4, "embed_dim": D, "depth": 2, "num_heads": 3, "num_classes": 5}
    return graticule.create_model("vit_tiny_patch16_224", **size, **options)


@pytest.fixture
def X():
    return torch.randn(D, N, dtype=NUMBER)


@pytest.mark.parametrize("kind", [Attention, CausalAttention])
def test_equations_1_and_2_every_output_is_a_weighted_average_of_the_inputs(kind, X):
    attention = drawn(kind(D, 1, qkv_bias=False))
    with torch.no_grad():  # the values are the inputs, and so is the projection
        attention.qkv.weight[2 * D :] = torch.eye(D)
        attention.proj.weight.copy_(torch.eye(D))
    A = attention.weights(X.T[None])[0, 0].T.detach()  # columns are the attending tokens
    torch.testing.assert_close(A.sum(0), torch.ones(N, dtype=NUMBER), rtol=0, atol=1e-13)
    torch.testing.assert_close(ours(attention, X), X @ A, rtol=0, atol=1e-13)
    for n in range(N):
        average = sum(X[:, n_] * A[n_, n] for n_ in range(N))
        torch.testing.assert_close(ours(attention, X)[:, n], average, rtol=0, atol=1e-13)


@pytest.mark.parametrize(("kind", "causal"), [(Attention, False), (CausalAttention, True)])
def test_equation_3_and_5_6_the_attention_matrix(kind, causal, X):
    attention = drawn(kind(D, 3, qkv_bias=False))
    U_q, U_k, _ = matrices(attention)
    weights = attention.weights(X.T[None])[0]
    for head in range(3):
        A = naive_attention_matrix(X, U_q[head], U_k[head], causal)
        torch.testing.assert_close(weights[head].T, A, rtol=0, atol=1e-13)
        assert (not A.tril(-1).any()) == causal  # section 4.1: upper-triangular


@in_turn(("kind", "causal"), [(Attention, False), (CausalAttention, True)])
@in_turn("heads", [1, 3, 4])
def test_equation_4_multi_head_self_attention(kind, causal, heads, X):
    attention = drawn(kind(D, heads, qkv_bias=False))
    U_q, U_k, V = matrices(attention)
    # one head of D channels has a V of full rank; more have K = D / H each (footnote 12)
    assert [int(torch.linalg.matrix_rank(V_h)) for V_h in V] == [D // heads] * heads
    torch.testing.assert_close(ours(attention, X), naive_mhsa(X, U_q, U_k, V, causal), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("kind", "causal"), [(Attention, False), (CausalAttention, True)])
def test_the_block_of_figure_5(kind, causal, X):
    block = drawn(Block(D, 3, mlp_ratio=2, qkv_bias=False, attn=kind(D, 3, qkv_bias=False)))
    norms = [(norm.weight, norm.bias, norm.eps) for norm in (block.norm1, block.norm2)]
    layers = [(layer.weight, layer.bias) for layer in (block.mlp.fc1, block.mlp.fc2)]
    with torch.no_grad():
        Y = X + naive_mhsa(naive_layer_norm(X, *norms[0]), *matrices(block.attn), causal)
        expected = Y + naive_mlp(naive_layer_norm(Y, *norms[1]), layers)
    torch.testing.assert_close(ours(block, X), expected, rtol=0, atol=1e-12)


@torch.no_grad()
def test_figure_2_W_maps_the_vector_of_each_patch_to_a_token():
    model = drawn(vit())
    image = torch.randn(3, 8, 12, dtype=NUMBER)
    W = model.patch_embed.proj.weight.flatten(1)
    patches = [image[:, y : y + 4, x : x + 4] for y in (0, 4) for x in (0, 4, 8)]
    X_0 = torch.stack([W @ patch.flatten() for patch in patches], 1)  # vec
    tokens = model.embed(image[None])[0].T
    torch.testing.assert_close(tokens[:, 1:], X_0, rtol=0, atol=1e-12)
    torch.testing.assert_close(tokens[:, 0], model.cls_token[0, 0])  # the learned token of section 4.2, at n = 0


@torch.no_grad()
@pytest.mark.parametrize("pool", ["avg", "token"])
def test_section_4_2_the_classifier_is_a_softmax_of_the_pooled_tokens_or_of_token_0(pool):
    model = drawn(vit(global_pool=pool, class_token=pool == "token", fc_norm=False))
    image = torch.randn(1, 3, 8, 12, dtype=NUMBER)
    X_M = model.forward_features(image)[0].T  # after the final norm, which the paper does not have
    h = X_M[:, 0] if pool == "token" else sum(x_n / X_M.shape[1] for x_n in X_M.T)  # ours is the mean, not the sum
    p = torch.tensor(
        [math.exp(g @ h + b) for g, b in zip(model.head.weight, model.head.bias, strict=True)], dtype=NUMBER
    )
    torch.testing.assert_close(model(image)[0].softmax(0), p / p.sum(), rtol=0, atol=1e-12)


@torch.no_grad()
def test_footnote_16_the_joining_concatenation_is_the_projection_of_tokens_and_table():
    model = drawn(vit(encoding="sinusoidal_2d", joining="concatenation"))
    image = torch.randn(1, 3, 8, 12, dtype=NUMBER)
    V_1, V_2 = torch.randn(D, D, dtype=NUMBER), model.position.joining.projection
    appended = torch.cat([V_1, V_2], 1) @ torch.cat(
        [model.embed(image)[0].T, model.position.encodings[0](model.grid).T]
    )
    W = model.patch_embed.proj.weight
    W.copy_(torch.einsum("ed,dcyx->ecyx", V_1, W))  # W' = V_1 W
    model.cls_token.copy_(model.cls_token @ V_1.T)
    added = model.position(model.grid)[0].enter_block(model.embed(image))[0].T
    torch.testing.assert_close(added, appended, rtol=0, atol=1e-12)


def test_section_3_without_position_permuting_the_columns_permutes_the_representations(X):
    block = drawn(Block(D, 3))
    order = torch.randperm(N)
    torch.testing.assert_close(ours(block, X[:, order]), ours(block, X)[:, order], rtol=0, atol=1e-12)


def test_footnote_17_the_mask_encodes_the_order(X):
    block = drawn(Block(D, 3, attn=CausalAttention(D, 3)))
    order = torch.tensor([1, 0, *range(2, N)])
    moved, still = ours(block, X[:, order]), ours(block, X)[:, order]
    assert (moved[:, :2] - still[:, :2]).abs().max() > 0.1  # the mask between the two is exchanged
    torch.testing.assert_close(moved[:, 2:], still[:, 2:], rtol=0, atol=1e-12)  # later tokens attend to the same set


def test_section_4_1_the_head_is_a_softmax_over_words():
    model = drawn(graticule.create_language_model("lm_nano", vocab_size=11, tied=False))
    tokens = torch.randint(11, (1, 6))
    with torch.no_grad():
        x = model.forward_features(tokens)[0, -1]  # x_{n-1}
        p = torch.tensor([math.exp(g_w @ x) for g_w in model.head.weight], dtype=NUMBER)
        torch.testing.assert_close(model(tokens)[0, -1].softmax(-1), p / p.sum(), rtol=0, atol=1e-12)


def test_the_layer_norm_that_is_printed_is_not_the_one_that_is_meant(X):
    def printed(X):
        return (X - X.mean(1, keepdim=True)) / X.var(1, keepdim=True, correction=0).sqrt()

    meant = nn.LayerNorm(D, elementwise_affine=False, dtype=NUMBER)
    torch.testing.assert_close(ours(meant, X), naive_layer_norm(X, 1, 0, meant.eps), rtol=0, atol=1e-13)
    later = X.clone()
    later[:, -1] += 1
    assert not torch.equal(printed(later)[:, 0], printed(X)[:, 0])  # the first token would depend on the last
    assert torch.equal(ours(meant, later)[:, :-1], ours(meant, X)[:, :-1])
