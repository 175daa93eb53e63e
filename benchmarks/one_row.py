# ruff: noqa
# mypy: ignore-errors
"""An experiment for a GPU: products of one row by our kernel and by cuBLAS, and steps with and without it: `python -m benchmarks.one_row steps`."""
import json, os, sys, time
from functools import partial
import torch
from torch.nn import functional as F
from benchmarks.gpu.machine import Machine, Replay, race, ceilings
from drafttrain.ops import library, linear as L
t0=time.time()
def say(*a): print(f"[{time.time()-t0:6.1f}]", *a, flush=True)
m=Machine.here(False); dev=m.device
say(m.name, library.state_on(dev).text)
torch.set_grad_enabled(False)
out={}
# correctness of product
worst={}
for dt in (torch.bfloat16, torch.float16, torch.float32):
    for O,I in ((17,72),(6144,4096),(4096,14336),(128256,4096),(4099,520)):
        x=torch.randn(1,I,device=dev).to(dt); w=torch.randn(O,I,device=dev).to(dt); b=torch.randn(O,device=dev).to(dt)
        want=F.linear(x.double(),w.double() if O<100000 else w.double(),b.double())
        for v in range(6):
            os.environ["DT_VARIANT"]=str(v)
            o=torch.full((1,O),float('nan'),device=dev,dtype=dt)
            torch.ops.drafttrain.product(x,w,b,o)
            e=((o.double()-want).norm()/want.norm()).item()
            worst[str(dt),v]=max(worst.get((str(dt),v),0),e) if e==e else float('inf')
        del w,want
say("product errors", worst)
WEIGHTS={"qkv":(4096,6144),"o":(4096,4096),"gate_up":(4096,28672),"down":(14336,4096),"head":(4096,128256),"1b_qkv":(2048,3072),"1b_down":(8192,2048)}
for name,(I,O) in WEIGHTS.items():
    draw=partial(torch.randn,device=dev,dtype=torch.bfloat16)
    n=2+2*m.cached//(2*I*O)
    ws=[draw(O,I) for _ in range(n)]; x=draw(1,I); rounds=-(-24//n)
    ways={}
    def work(way):
        def go():
            for _ in range(rounds):
                for w in ws:
                    if way=="cublas": F.linear(x,w)
                    else:
                        o=torch.empty(1,O,device=dev,dtype=torch.bfloat16); torch.ops.drafttrain.product(x,w,None,o)
        return go
    for way in ["cublas"]+[f"{v}{p}" for v in range(6) for p in ("","n")]:
        if way!="cublas":
            os.environ["DT_VARIANT"]=way[0]
            if way.endswith("n"): os.environ["DT_NO_PDL"]="1"
            else: os.environ.pop("DT_NO_PDL",None)
        ways[way]=partial(Replay(work(way),m).seconds,4)
    os.environ.pop("DT_NO_PDL",None)
    r=race(ways,5); us={k:1e6*v/rounds/n for k,v in r.items()}
    out[name]=us
    say(name, {k:f"{u:.1f}us {2*I*O/u/1e6:.2f}" for k,u in us.items()})
    del ws
c=ceilings(m).look(); say("ceilings", c.figures)
if "steps" in sys.argv:
    from benchmarks.gpu import steps
    from benchmarks.gpu.steps import Setting, Shared, Station
    target=steps.target_of("Llama-3.1-8B",m); shared=Shared(target)
    say("model made")
    setting=Setting("Llama-3.1-8B",1,4096,(1,64))
    stations={}
    for nm,env in {"cublas":(),"ours":("DT_PRODUCT",)}.items():
        for nodes in (1,64):
            for v in ((0,1,2,3) if nm=="ours" and nodes==1 else (0,)):
                for e in ("DT_NO_PDL","DT_PRODUCT"): os.environ.pop(e,None)
                for e in env: os.environ[e]="1"
                os.environ["DT_VARIANT"]=str(v)
                try: stations[f"{nm} {nodes} v{v}"]=Station(shared,setting,nodes,m)
                except Exception as err: say("FAILED",nm,nodes,v,repr(err)[:300])
    say("captured")
    for e in ("DT_NO_PDL","DT_PRODUCT"): os.environ.pop(e,None)
    r=race({k:s.seconds for k,s in stations.items()},8)
    out["steps"]={k:1e3*v for k,v in r.items()}; say({k:f"{1e3*v:.3f} ms" for k,v in r.items()})
    for k,s in stations.items():
        try: f=s.figures(); say(k, s.weight_bytes/1e9, {a:(round(b,4) if isinstance(b,float) else b) for a,b in f.items()})
        except Exception as err: say(k,"FIGURES FAILED",repr(err)[:300])
json.dump(out,open(os.path.join(os.environ.get("OUT","/tmp"),"explore.json"),"w"))
