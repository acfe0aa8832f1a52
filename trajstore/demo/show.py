"""stub."""
def everything(console, store, policy, version, updates, seconds, seed):
    print(seconds)
    for u in updates: print(u)
    from trajstore.query import connect
    c=connect(store,current_version=version)
    for q in ["select version_gap g,count(*) n,sum(length) t,avg(reward) r,max(length) from trajectories group by 1 order by 1","select version_id v,status,count(*) n,avg(reward) r from trajectories group by 1,2 order by 1,2","select continuation_count, status, count(*), avg(newest_version_id-oldest_version_id) from trajectories group by 1,2","select newest_version_id-oldest_version_id as span, count(*) from trajectories group by 1"]:
        print(c.sql(q).to_pandas() if 0 else "\n".join(map(str,c.sql(q).to_pylist())))
    print(len(store.history()))
